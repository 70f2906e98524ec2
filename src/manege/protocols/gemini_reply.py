"""Canonical answers to those of the Gemini API: whole, as server-sent events, or as a JSON array that grows.

Every streamed object holds what is new of one candidate; the last one holds the finish reasons and token counts. A
candidate always has a part, if only an empty text: clients forget turns that have none. The stream has no end mark.

The signature of a function call is the id of the call in base64; clients send it back with the part.
"""

import base64
from collections.abc import Sequence
from typing import Any, Literal

import orjson

from manege.errors import ContextOverflowError, ManegeError
from manege.protocols.base import Choice, ModelReply, ReplyDelta, ReplyHead, TokenLogprob
from manege.protocols.sse import MEDIA_TYPE, event
from manege.protocols.values import arguments_object
from manege.types import FinishReason, JsonObject

__all__ = ["Form", "GeminiStream", "error_body", "response_body"]

Form = Literal["sse", "array"]

_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def response_body(reply: ModelReply) -> JsonObject:
    """The body of an answer."""
    candidates = []
    for index, choice in enumerate(reply.choices):
        message = choice.message
        parts = _parts(
            reply.head,
            reasoning=message.get("reasoning_content") or "",
            content=message["content"],
            tool_calls=message.get("tool_calls") or (),
        )
        candidates.append(_candidate(index, parts, choice.logprobs) | {"finishReason": _finish_reason(choice)})
    return {"candidates": candidates, **_identity(reply.head), "usageMetadata": _usage(reply)}


class GeminiStream:
    """See `protocols.base.ReplyStream`."""

    def __init__(self, head: ReplyHead, form: Form) -> None:
        self.media_type = MEDIA_TYPE if form == "sse" else "application/json"
        self._head, self._is_array = head, form == "array"
        self._separator = b""

    def start(self) -> bytes:
        return b"[" if self._is_array else b""

    def heartbeat(self) -> bytes:
        # Google's own Python client takes the comments of an event stream for JSON; an empty line harms nobody.
        return b"\n"

    def delta(self, choice: int, delta: ReplyDelta) -> bytes:
        parts = _parts(self._head, reasoning=delta.reasoning, content=delta.content, tool_calls=delta.tool_calls)
        if not parts and not delta.logprobs:
            return b""
        return self._object({"candidates": [_candidate(choice, parts, delta.logprobs)], **_identity(self._head)})

    def finish(self, reply: ModelReply) -> bytes:
        candidates = [
            _candidate(index, [], ()) | {"finishReason": _finish_reason(choice)}
            for index, choice in enumerate(reply.choices)
        ]
        last = {"candidates": candidates, **_identity(self._head), "usageMetadata": _usage(reply)}
        return self._object(last) + self._closing()

    def error(self, error: ManegeError) -> bytes:
        return self._object(error_body(error)) + self._closing()

    def _object(self, value: JsonObject) -> bytes:
        if not self._is_array:
            return event(value)
        separator, self._separator = self._separator, b",\n"
        return separator + orjson.dumps(value)

    def _closing(self) -> bytes:
        return b"]" if self._is_array else b""


def error_body(error: ManegeError) -> JsonObject:
    """Google's error object."""
    status = _STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    message = str(error)
    if isinstance(error, ContextOverflowError):
        num_prompt, limit = getattr(error, "num_prompt", None), getattr(error, "context_limit", None)
        if num_prompt is not None and limit is not None:
            message = f"The input token count ({num_prompt}) exceeds the maximum number of tokens allowed ({limit})."
    return {"error": {"code": error.status, "message": message, "status": status}}


def _identity(head: ReplyHead) -> JsonObject:
    return {"modelVersion": head.model, "responseId": head.id}


def _parts(head: ReplyHead, *, reasoning: str, content: str, tool_calls: Sequence[JsonObject]) -> list[JsonObject]:
    parts: list[JsonObject] = []
    if reasoning:
        parts.append({"text": reasoning, "thought": True})
    if content:
        parts.append({"text": content})
    for call in tool_calls:
        function = call["function"]
        shape = {"id": call["id"], "name": function["name"], "args": arguments_object(function["arguments"])}
        parts.append({"functionCall": shape, "thoughtSignature": base64.b64encode(head.id.encode()).decode()})
    return parts


def _candidate(index: int, parts: list[JsonObject], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    candidate: dict[str, Any] = {"index": index, "content": {"role": "model", "parts": parts or [{"text": ""}]}}
    if logprobs:
        chosen = [{"token": token.text, "logProbability": token.logprob} for token in logprobs]
        candidate["logprobsResult"] = {"chosenCandidates": chosen}
    return candidate


def _finish_reason(choice: Choice) -> str:
    return "MAX_TOKENS" if choice.finish_reason is FinishReason.LENGTH else "STOP"


def _usage(reply: ModelReply) -> JsonObject:
    num_prompt, num_sampled = reply.head.num_prompt, sum(choice.num_sampled for choice in reply.choices)
    return {
        "promptTokenCount": num_prompt,
        "candidatesTokenCount": num_sampled,
        "totalTokenCount": num_prompt + num_sampled,
        "cachedContentTokenCount": reply.num_cached,
    }
