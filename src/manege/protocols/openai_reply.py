"""What whole and streamed answers of chat completions and completions have in common."""

from collections.abc import Sequence
from typing import Any

from manege.protocols.base import Choice, ModelReply, ModelRequest, ReplyHead
from manege.protocols.openai_tools import custom_input
from manege.types import FinishReason, JsonObject

__all__ = ["chat_finish", "chat_tool_call", "custom_names", "finish", "head_fields", "reply_body", "usage"]


def head_fields(head: ReplyHead, *, id: str, kind: str) -> dict[str, Any]:
    """The fields that an answer and each of its chunks begin with."""
    return {"id": id, "object": kind, "created": int(head.created_s), "model": head.model}


def reply_body(reply: ModelReply, *, id: str, kind: str, choices: Sequence[JsonObject]) -> dict[str, Any]:
    """A whole answer around its choices."""
    return head_fields(reply.head, id=id, kind=kind) | {"choices": choices, "usage": usage(reply)}


def usage(reply: ModelReply) -> JsonObject:
    """Token counts, of all choices together."""
    num_sampled = sum(choice.num_sampled for choice in reply.choices)
    return {
        "prompt_tokens": reply.head.num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": reply.head.num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached},
    }


def finish(choice: Choice) -> dict[str, Any]:
    """Why a choice ended; `stop_reason`, the caller's string that ended it, is vLLM's."""
    reason = "length" if choice.finish_reason is FinishReason.LENGTH else "stop"
    stop = {} if choice.stop_sequence is None else {"stop_reason": choice.stop_sequence}
    return {"finish_reason": reason, **stop}


def chat_finish(choice: Choice) -> dict[str, Any]:
    """The same for a chat, where calls of tools are a reason too."""
    fields = finish(choice)
    if fields["finish_reason"] == "stop" and choice.message.get("tool_calls"):
        fields["finish_reason"] = "tool_calls"
    return fields


def custom_names(request: ModelRequest) -> frozenset[str]:
    """The caller's free-text tools."""
    tools = [tool for tool in request.raw.get("tools") or () if tool.get("type") == "custom"]
    return frozenset(tool["custom"]["name"] for tool in tools)


def chat_tool_call(call: JsonObject, custom: frozenset[str]) -> JsonObject:
    """A canonical call in the form of the tool that it calls."""
    function = call["function"]
    if function["name"] not in custom:
        return call
    text = {"name": function["name"], "input": custom_input(function["arguments"])}
    return {"id": call["id"], "type": "custom", "custom": text}
