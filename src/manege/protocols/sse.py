"""Server-sent events: one event as bytes (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from typing import Any

import orjson

__all__ = ["DONE", "HEARTBEAT", "MEDIA_TYPE", "event"]

MEDIA_TYPE = "text/event-stream"
HEARTBEAT = b": keep-alive\n\n"
"""A comment, which parsers skip."""
DONE = b"data: [DONE]\n\n"
"""How OpenAI's chat and text completions end."""


def event(data: Any, name: str | None = None) -> bytes:
    """`data` as JSON, under an event name where the protocol uses one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
