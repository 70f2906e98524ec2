"""Canonical answers to Messages of the Anthropic API: whole, and as a stream of events.

https://docs.anthropic.com/en/docs/build-with-claude/streaming. A stream is `message_start`, then per content block one
`content_block_start`, its deltas and one `content_block_stop`, with indexes that grow by one, then `message_delta` and
`message_stop`. One block is open at a time; it is closed where another kind of content begins.

The signature of a thinking block is the id of the call: clients send it back only if it is there.
"""

from typing import Any

from manege.errors import ContextOverflowError, ManegeError
from manege.protocols.anthropic_messages import wire_id
from manege.protocols.base import Choice, ModelReply, ReplyDelta, ReplyHead
from manege.protocols.sse import MEDIA_TYPE, event
from manege.protocols.values import arguments_object, to_json
from manege.types import FinishReason, JsonObject

__all__ = ["MessagesStream", "error_body", "message_body"]

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def message_body(reply: ModelReply) -> JsonObject:
    """The body of an answer; Messages have one choice."""
    (choice,) = reply.choices
    message = choice.message
    content: list[JsonObject] = []
    if message.get("reasoning_content"):
        thinking = message["reasoning_content"]
        content.append({"type": "thinking", "thinking": thinking, "signature": reply.head.id})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        content.append(_tool_use(call, arguments_object(call["function"]["arguments"])))
    return _message(reply.head, content=content, end=_end(choice), usage=_usage(reply))


class MessagesStream:
    """See `protocols.base.ReplyStream`."""

    media_type = MEDIA_TYPE

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._index = 0
        """Of the block that is open, or else of the next one."""
        self._open: str | None = None
        """Its type."""

    def start(self) -> bytes:
        usage = _token_counts(num_prompt=self._head.num_prompt, num_cached=0, num_sampled=0)
        message = _message(self._head, content=[], end={"stop_reason": None, "stop_sequence": None}, usage=usage)
        return _event({"type": "message_start", "message": message})

    def heartbeat(self) -> bytes:
        return _event({"type": "ping"})

    def delta(self, choice: int, delta: ReplyDelta) -> bytes:
        sent = b""
        if delta.reasoning:
            sent += self._begin({"type": "thinking", "thinking": "", "signature": ""})
            sent += self._add({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            sent += self._begin({"type": "text", "text": ""})
            sent += self._add({"type": "text_delta", "text": delta.content})
        for call in delta.tool_calls:
            sent += self._begin(_tool_use(call, {}))
            sent += self._add({"type": "input_json_delta", "partial_json": _input_text(call["function"]["arguments"])})
            sent += self._end()
        return sent

    def finish(self, reply: ModelReply) -> bytes:
        (choice,) = reply.choices
        ended = {"type": "message_delta", "delta": _end(choice), "usage": _usage(reply)}
        return self._end() + _event(ended) + _event({"type": "message_stop"})

    def error(self, error: ManegeError) -> bytes:
        return _event(error_body(error))

    def _begin(self, block: JsonObject) -> bytes:
        """Open a block, unless one of this type is open."""
        if self._open == block["type"]:
            return b""
        closed, self._open = self._end(), block["type"]
        return closed + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _add(self, delta: JsonObject) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _end(self) -> bytes:
        """Close the block that is open, if any."""
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._add({"type": "signature_delta", "signature": self._head.id})
        closed = _event({"type": "content_block_stop", "index": self._index})
        self._open, self._index = None, self._index + 1
        return signed + closed


def error_body(error: ManegeError) -> JsonObject:
    """The API's error object. Harnesses compact their history when they read `prompt is too long`."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = str(error)
    if isinstance(error, ContextOverflowError):
        num_prompt, limit = getattr(error, "num_prompt", None), getattr(error, "context_limit", None)
        counted = num_prompt is not None and limit is not None
        message = "prompt is too long: " + (f"{num_prompt} tokens > {limit} maximum" if counted else message)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(data: JsonObject) -> bytes:
    return event(data, data["type"])


def _message(head: ReplyHead, *, content: list[JsonObject], end: JsonObject, usage: JsonObject) -> JsonObject:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        **end,
        "usage": usage,
    }


def _tool_use(call: JsonObject, value: JsonObject) -> JsonObject:
    return {"type": "tool_use", "id": wire_id(call["id"]), "name": call["function"]["name"], "input": value}


def _input_text(arguments: str) -> str:
    """What the model wrote, byte for byte, if it is the text of an object; clients parse it."""
    value = arguments_object(arguments)
    return to_json(value, "input") if "_raw" in value else arguments


def _end(choice: Choice) -> dict[str, Any]:
    if choice.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif choice.stop_sequence is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if choice.message.get("tool_calls") else "end_turn"
    return {"stop_reason": reason, "stop_sequence": choice.stop_sequence if reason == "stop_sequence" else None}


def _usage(reply: ModelReply) -> JsonObject:
    num_sampled = sum(choice.num_sampled for choice in reply.choices)
    return _token_counts(num_prompt=reply.head.num_prompt, num_cached=reply.num_cached, num_sampled=num_sampled)


def _token_counts(*, num_prompt: int, num_cached: int, num_sampled: int) -> JsonObject:
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_sampled,
    }
