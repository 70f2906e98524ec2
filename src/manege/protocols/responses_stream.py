"""A streamed answer of Responses.

Items are opened in the order in which their first token comes and closed before the next is opened; each `added` has
one `done`, ids and positions are those of the final object, and `sequence_number` counts the events. Text that comes
after a tool call is a second message item, which the caller's next request folds into the first again.
"""

from typing import Any

from manege.errors import ContextOverflowError, ManegeError
from manege.protocols import sse
from manege.protocols.base import ModelReply, ModelRequest, ReplyDelta, ReplyHead, TokenLogprob
from manege.protocols.openai import shown_logprob
from manege.protocols.responses_reply import ItemWriter, response_body
from manege.types import FinishReason, JsonObject

__all__ = ["ResponsesStream"]


class ResponsesStream:
    """See `protocols.base.ReplyStream`."""

    media_type = sse.MEDIA_TYPE

    def __init__(self, request: ModelRequest, head: ReplyHead) -> None:
        self._request, self._head = request, head
        self._write = ItemWriter(request, head)
        self._num_events = 0
        self._output: list[JsonObject] = []
        """The items that are closed."""
        self._item: JsonObject | None = None
        """The reasoning or message that is being written, as it was opened."""
        self._text = ""
        """Of the open item."""
        self._logprobs: list[TokenLogprob] = []
        """Of tokens that no closed message shows."""
        self._num_sent = 0
        """How many of those stood in a delta."""

    def start(self) -> bytes:
        return self._state("created") + self._state("in_progress")

    def heartbeat(self) -> bytes:
        return self._state("in_progress")

    def delta(self, choice: int, delta: ReplyDelta) -> bytes:
        self._logprobs += delta.logprobs
        events = b""
        if delta.reasoning:
            events += self._switch("reasoning") + self._reasoning_delta(delta.reasoning)
        if delta.content:
            events += self._switch("message") + self._content_delta(delta.content)
        for call in delta.tool_calls:
            events += self._close("completed") + self._tool_call(call)
        return events

    def finish(self, reply: ModelReply) -> bytes:
        events = b"" if self._item or self._output else self._switch("message")
        is_cut = reply.choices[0].finish_reason is FinishReason.LENGTH
        events += self._close("incomplete" if is_cut else "completed")
        body = response_body(self._request, reply.head, reply=reply, output=self._output)
        return events + self._event(body["status"], response=body)

    def error(self, error: ManegeError) -> bytes:
        told = {"code": _code(error), "message": str(error)}
        body = response_body(self._request, self._head, output=self._output, error=told)
        return self._event("failed", response=body)

    def _state(self, name: str) -> bytes:
        return self._event(name, response=response_body(self._request, self._head, output=self._output))

    def _switch(self, kind: str) -> bytes:
        """Make an item of this kind the open one."""
        if self._item is not None and self._item["type"] == kind:
            return b""
        events, self._text = self._close("completed"), ""
        make = self._write.message if kind == "message" else self._write.reasoning
        self._item = make(len(self._output), None, "in_progress")
        events += self._item_event("added", self._item)
        if kind == "reasoning":
            return events + self._summary_part(self._item, "added")
        part = self._write.text_part("", ())
        return events + self._in_item(self._item, "content_part.added", content_index=0, part=part)

    def _reasoning_delta(self, text: str) -> bytes:
        self._text += text
        return self._in_item(self._item, "reasoning_summary_text.delta", summary_index=0, delta=text)

    def _content_delta(self, text: str) -> bytes:
        self._text += text
        new = [shown_logprob(token) for token in self._logprobs[self._num_sent :]]
        self._num_sent = len(self._logprobs)
        return self._in_item(self._item, "output_text.delta", content_index=0, delta=text, logprobs=new)

    def _close(self, status: str) -> bytes:
        """Close the open item, if there is one."""
        if self._item is None:
            return b""
        kind, self._item = self._item["type"], None
        if kind == "reasoning":
            item = self._write.reasoning(len(self._output), self._text, status)
            events = self._in_item(item, "reasoning_summary_text.done", summary_index=0, text=self._text)
            return events + self._summary_part(item, "done") + self._item_done(item)
        part = self._write.text_part(self._text, self._logprobs)
        self._logprobs, self._num_sent = [], 0
        item = self._write.message(len(self._output), part, status)
        shown = part.get("logprobs", [])
        events = self._in_item(item, "output_text.done", content_index=0, text=self._text, logprobs=shown)
        return events + self._in_item(item, "content_part.done", content_index=0, part=part) + self._item_done(item)

    def _tool_call(self, call: JsonObject) -> bytes:
        item = self._write.tool_call(len(self._output), call, "completed")
        is_custom = item["type"] == "custom_tool_call"
        field, name = ("input", "custom_tool_call_input") if is_custom else ("arguments", "function_call_arguments")
        text = item[field]
        events = self._item_event("added", {**item, field: "", "status": "in_progress"})
        if text:
            events += self._in_item(item, f"{name}.delta", delta=text)
        events += self._in_item(item, f"{name}.done", **{field: text})
        return events + self._item_done(item)

    def _item_done(self, item: JsonObject) -> bytes:
        event = self._item_event("done", item)
        self._output.append(item)
        return event

    def _item_event(self, name: str, item: JsonObject) -> bytes:
        return self._event(f"output_item.{name}", output_index=len(self._output), item=item)

    def _summary_part(self, item: JsonObject, name: str) -> bytes:
        part = {"type": "summary_text", "text": self._text}
        return self._in_item(item, f"reasoning_summary_part.{name}", summary_index=0, part=part)

    def _in_item(self, item: JsonObject | None, name: str, **fields: Any) -> bytes:
        assert item is not None, "an event of an item before it was opened"
        return self._event(name, item_id=item["id"], output_index=len(self._output), **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        kind = f"response.{name}"
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return sse.event(data, kind)


def _code(error: ManegeError) -> str:
    """The codes that a failed response may have, and the one by which harnesses know that they must shorten."""
    if isinstance(error, ContextOverflowError):
        return error.code
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"
