"""The messages that a call was asked with, put together again: a continued call keeps only what its parent lacks."""

from collections.abc import Mapping, Sequence

from manege.types import Call, CallId, JsonObject

__all__ = ["messages_before"]


def messages_before(call: Call, calls: Mapping[CallId, Call]) -> Sequence[JsonObject]:
    """Those of the call that the gateway continued, its answer, and the new ones; empty for text completions. `calls`:
    of the same attempt, by id."""
    parts: list[Sequence[JsonObject]] = [call.request.get("messages") or []]
    while call.parent is not None and call.parent in calls:
        call = calls[call.parent]
        parts += [[call.reply], call.request.get("messages") or []]
    return [message for part in reversed(parts) for message in part]
