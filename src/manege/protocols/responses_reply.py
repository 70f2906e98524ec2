"""The response object of Responses and its output items, the same in whole and in streamed answers.

The id of an item is `<kind>_<call>_<position>`; the encrypted content of reasoning is the call's id. Callers send both
back, which is how their history is recognised.
"""

from collections.abc import Sequence
from typing import Any

from manege.protocols.base import ModelReply, ModelRequest, ReplyHead, TokenLogprob
from manege.protocols.openai import shown_logprob
from manege.protocols.openai_tools import custom_input
from manege.protocols.responses_tools import CallerTool, declared_tools
from manege.types import FinishReason, JsonObject

__all__ = ["ItemWriter", "response_body", "whole_output"]

# What a response repeats of its request, with the values of what was not said.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "store": False,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


class ItemWriter:
    """Makes the output items of one response."""

    def __init__(self, request: ModelRequest, head: ReplyHead) -> None:
        self._wants_logprobs = request.wants_logprobs
        self._callers = declared_tools(request.raw).callers
        self._call = head.id

    def reasoning(self, index: int, text: str | None, status: str) -> JsonObject:
        """`index`: its position in the output; `text` None: not begun yet."""
        return {
            "id": f"rs_{self._call}_{index}",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": text}] if text is not None else [],
            "encrypted_content": self._call,
            "status": status,
        }

    def message(self, index: int, part: JsonObject | None, status: str) -> JsonObject:
        """`part`: its text; None: not begun yet."""
        return {
            "id": f"msg_{self._call}_{index}",
            "type": "message",
            "role": "assistant",
            "content": [] if part is None else [part],
            "status": status,
        }

    def text_part(self, text: str, logprobs: Sequence[TokenLogprob]) -> JsonObject:
        """The one part of a message."""
        shown = {"logprobs": [shown_logprob(token) for token in logprobs]} if self._wants_logprobs else {}
        return {"type": "output_text", "text": text, "annotations": [], **shown}

    def tool_call(self, index: int, call: JsonObject, status: str) -> JsonObject:
        """A call in the form of the tool that it calls."""
        function = call["function"]
        caller = self._callers.get(function["name"], CallerTool(namespace=None, name=function["name"], is_custom=False))
        if caller.is_custom:
            kind, prefix, text = "custom_tool_call", "ctc", {"input": custom_input(function["arguments"])}
        else:
            kind, prefix, text = "function_call", "fc", {"arguments": function["arguments"]}
        space = {} if caller.namespace is None else {"namespace": caller.namespace}
        return {
            "id": f"{prefix}_{self._call}_{index}",
            "type": kind,
            "call_id": call["id"],
            **space,
            "name": caller.name,
            **text,
            "status": status,
        }


def whole_output(request: ModelRequest, reply: ModelReply) -> list[JsonObject]:
    """The items of an answer: reasoning, text, calls."""
    write, choice = ItemWriter(request, reply.head), reply.choices[0]
    message, calls = choice.message, choice.message.get("tool_calls") or ()
    reasoning, content = message.get("reasoning_content"), message["content"]
    # Only what was being written when the tokens ran out is incomplete.
    cut = "completed" if choice.finish_reason is not FinishReason.LENGTH or calls else "incomplete"
    output: list[JsonObject] = []
    if reasoning:
        output.append(write.reasoning(0, reasoning, "completed" if content else cut))
    if content or not (reasoning or calls):
        output.append(write.message(len(output), write.text_part(content, choice.logprobs), cut))
    for call in calls:
        output.append(write.tool_call(len(output), call, "completed"))
    return output


def response_body(
    request: ModelRequest,
    head: ReplyHead,
    *,
    reply: ModelReply | None = None,
    output: Sequence[JsonObject] = (),
    error: JsonObject | None = None,
) -> JsonObject:
    """The response object; without reply and error it is in progress."""
    is_cut = reply is not None and reply.choices[0].finish_reason is FinishReason.LENGTH
    status = "failed" if error else "in_progress" if reply is None else "incomplete" if is_cut else "completed"
    said = {key: value for key in _REPEATED if (value := request.raw.get(key)) is not None}
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": int(head.created_s),
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": head.model,
        "output": list(output),
        "previous_response_id": None,
        **_REPEATED,
        **said,
        "usage": None if reply is None else _usage(reply),
    }


def _usage(reply: ModelReply) -> JsonObject:
    num_prompt, num_sampled = reply.head.num_prompt, reply.choices[0].num_sampled
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": reply.num_cached, "cache_write_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_sampled,
    }
