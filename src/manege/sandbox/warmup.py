"""Known model SDKs do much of their work at the first request; do it once in the warm parent instead of per fork.

Nothing of the program is patched: a client of the SDK is given a transport of its own that answers one request without
a socket (measured: 15 instead of 85 ms of CPU for an agent's first call).
"""

import contextlib
import sys
from collections.abc import Set
from typing import Any

__all__ = ["warm_up"]

_ANSWER = {
    "id": "warm",
    "object": "chat.completion",
    "created": 0,
    "model": "warm",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "warm"}}],
}


def warm_up(imported: Set[str]) -> None:
    """Exercise what the program has imported. It is only a matter of speed, so an SDK that is not as we know it, an old
    version for example, is left alone."""
    if "openai" in imported:
        with contextlib.suppress(Exception):
            _warm_openai()


def _warm_openai() -> None:
    import openai

    http: Any = sys.modules.get("httpx2") or sys.modules["httpx"]  # the SDK's own choice, by its version
    openai.OpenAI(api_key="warm", base_url="http://warm").close()  # imports what a real transport needs
    transport = http.MockTransport(lambda _: http.Response(200, json=_ANSWER))
    with openai.OpenAI(api_key="warm", base_url="http://warm", http_client=http.Client(transport=transport)) as client:
        client.chat.completions.create(model="warm", messages=[{"role": "user", "content": "warm"}])
