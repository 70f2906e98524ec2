"""Known model SDKs do much of their work at the first request; do it once in the warm parent instead of per fork.

Nothing of the program is patched: a client of the SDK makes one real request to a stand-in on loopback, a fork that
answers once and ends. Before `gc.freeze`, and leaving no socket open.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Set

__all__ = ["warm_up"]

_PATIENCE_S = 5

_BODY = json.dumps(
    {
        "id": "warm",
        "object": "chat.completion",
        "created": 0,
        "model": "warm",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "warm"}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
)
_ANSWER = (
    f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(_BODY)}\r\nconnection: close\r\n\r\n"
    f"{_BODY}"
)


def warm_up(imported: Set[str]) -> None:
    """Exercise what the program has imported. It is only a matter of speed, so an SDK that is not as we know it, an old
    version for example, is left alone."""
    if "openai" in imported:
        with contextlib.suppress(Exception):
            _warm_openai()


def _warm_openai() -> None:
    import openai

    with _stand_in() as url, openai.OpenAI(api_key="warm", base_url=f"{url}/v1", max_retries=0) as client:
        client.chat.completions.create(model="warm", messages=[{"role": "user", "content": "warm"}])


@contextlib.contextmanager
def _stand_in() -> Iterator[str]:
    """The address of a server that answers one request."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = os.fork()
        if pid == 0:
            _answer_once(listener)
        port = listener.getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.waitpid(pid, 0)


def _answer_once(listener: socket.socket) -> None:
    try:
        listener.settimeout(_PATIENCE_S)
        connection, _ = listener.accept()
        connection.settimeout(_PATIENCE_S)
        received = chunk = connection.recv(1 << 16)
        while chunk and not received.endswith(b"}"):
            chunk = connection.recv(1 << 16)
            received += chunk
        connection.sendall(_ANSWER.encode())
    finally:
        os._exit(0)
