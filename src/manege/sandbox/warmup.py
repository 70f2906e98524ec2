"""Known model SDKs do half their imports at the first request; do them once in the warm parent instead of per fork.

Nothing of the agent is patched and nothing leaves the process: a client of the SDK gets a canned answer from an
in-memory transport.
"""

import contextlib
from collections.abc import Set
from typing import Any

__all__ = ["warm_up"]

_REPLY: dict[str, Any] = {
    "id": "warm",
    "object": "chat.completion",
    "created": 0,
    "model": "warm",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "warm"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def warm_up(imported: Set[str]) -> None:
    """Exercise what the program has imported. It is only a matter of speed, so an SDK that is not as we know it, an old
    version for example, is left alone."""
    if "openai" in imported:
        with contextlib.suppress(Exception):
            _warm_openai()


def _warm_openai() -> None:
    import httpx
    import openai

    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=_REPLY))
    client = httpx.Client(transport=transport)
    with openai.OpenAI(api_key="warm", base_url="http://127.0.0.1:9/v1", http_client=client) as sdk:
        sdk.chat.completions.create(model="warm", messages=[{"role": "user", "content": "warm"}])
    openai.OpenAI(api_key="warm", base_url="http://127.0.0.1:9/v1").close()
