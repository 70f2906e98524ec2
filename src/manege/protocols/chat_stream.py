"""A streamed answer of chat completions: chunks of one or more choices, ended by `[DONE]`.

Per choice: a chunk with the role, chunks that add to reasoning, content or tool calls, and one with the finish reason;
then, if asked for, one with the token counts and no choices. Token ids and log-probabilities stand in the chunk that
their tokens cause, which may add no text.
"""

from typing import Any

from manege.errors import ManegeError
from manege.protocols import sse
from manege.protocols.base import ModelReply, ModelRequest, ReplyDelta, ReplyHead
from manege.protocols.openai import error_body, shown_logprob
from manege.protocols.openai_reply import chat_finish, chat_tool_call, custom_names, head_fields, usage
from manege.types import JsonObject

__all__ = ["ChatStream"]


class ChatStream:
    """See `protocols.base.ReplyStream`."""

    media_type = sse.MEDIA_TYPE

    def __init__(self, request: ModelRequest, head: ReplyHead) -> None:
        self._request = request
        self._head = head_fields(head, id=f"chatcmpl-{head.id}", kind="chat.completion.chunk")
        if request.wants_usage:
            # As OpenAI does: null in all chunks but the last.
            self._head["usage"] = None
        self._prompt_ids = head.prompt_ids
        self._custom = custom_names(request)
        self._num_calls = [0] * request.num_choices

    def start(self) -> bytes:
        first = self._prompt_fields()
        chunks = []
        for choice in range(self._request.num_choices):
            chunks.append(self._chunk(choice, {"role": "assistant", "content": ""}, **first))
            first = {}
        return b"".join(chunks)

    def heartbeat(self) -> bytes:
        return sse.HEARTBEAT

    def delta(self, choice: int, delta: ReplyDelta) -> bytes:
        parts: list[JsonObject] = []
        if delta.reasoning:
            parts.append({"reasoning_content": delta.reasoning})
        if delta.content:
            parts.append({"content": delta.content})
        for call in delta.tool_calls:
            parts += self._call_parts(choice, call)
        tokens: dict[str, Any] = {}
        if delta.logprobs:
            tokens["logprobs"] = {"content": [shown_logprob(token) for token in delta.logprobs], "refusal": None}
        if delta.response_ids:
            tokens["token_ids"] = list(delta.response_ids)
        if tokens and not parts:
            parts.append({})
        chunks = []
        for part in parts:
            chunks.append(self._chunk(choice, part, tokens))
            tokens = {}
        return b"".join(chunks)

    def finish(self, reply: ModelReply) -> bytes:
        first = self._prompt_fields(reply.head)
        chunks = []
        for index, choice in enumerate(reply.choices):
            chunks.append(self._chunk(index, {}, chat_finish(choice), **first))
            first = {}
        if self._request.wants_usage:
            chunks.append(sse.event({**self._head, "choices": [], "usage": usage(reply)}))
        return b"".join(chunks) + sse.DONE

    def error(self, error: ManegeError) -> bytes:
        # No [DONE] follows: a caller that does not know this event must not take the answer for a whole one.
        return sse.event(error_body(error))

    def _call_parts(self, choice: int, call: JsonObject) -> list[JsonObject]:
        """An opening part without arguments, then the arguments: some clients lose those of the opening part."""
        index = self._num_calls[choice]
        self._num_calls[choice] += 1
        call = chat_tool_call(call, self._custom)
        kind, field = ("custom", "input") if call["type"] == "custom" else ("function", "arguments")
        opening = {"index": index, **call, kind: {**call[kind], field: ""}}
        return [
            {"tool_calls": [opening]},
            {"tool_calls": [{"index": index, kind: {field: call[kind][field]}}]},
        ]

    def _prompt_fields(self, head: ReplyHead | None = None) -> dict[str, Any]:
        """vLLM's `prompt_token_ids`, once: at the start if they are known by then."""
        if head is not None:
            self._prompt_ids = head.prompt_ids if self._prompt_ids is None else None
        return {} if self._prompt_ids is None else {"prompt_token_ids": list(self._prompt_ids)}

    def _chunk(self, choice: int, delta: JsonObject, fields: JsonObject | None = None, **top: Any) -> bytes:
        shown = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **(fields or {})}
        return sse.event({**self._head, "choices": [shown], **top})
