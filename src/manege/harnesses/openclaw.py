"""OpenClaw's context of the moment, put back to where it stood at the first call.

In its completions and messages modes it is a user message that moves to the end with every call, so that no prompt
continues another. (As we start it, OpenClaw speaks Responses, where it stays in its place.)
"""

from collections.abc import Sequence
from dataclasses import replace

from manege.protocols.base import ModelRequest
from manege.types import JsonObject

__all__ = ["settle_context"]

_CONTEXT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"


def settle_context(request: ModelRequest) -> tuple[ModelRequest, Sequence[str]]:
    """`user, assistant, tool, CONTEXT` -> `user, CONTEXT, assistant, tool`."""
    *earlier, last = request.messages or [{}]
    first = next((index for index, message in enumerate(earlier) if message["role"] == "assistant"), None)
    if first is None or not _is_context(last) or any(_is_context(message) for message in earlier):
        return request, ()
    line = f"context of the moment: from message {len(earlier)} to {first}"
    return replace(request, messages=[*earlier[:first], last, *earlier[first:]]), [line]


def _is_context(message: JsonObject) -> bool:
    content = message.get("content")
    return message.get("role") == "user" and isinstance(content, str) and content.startswith(_CONTEXT)
