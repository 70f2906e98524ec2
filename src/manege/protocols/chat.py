"""OpenAI's chat completions, with vLLM's `return_token_ids`, `top_k` and `min_p`.

https://platform.openai.com/docs/api-reference/chat/create. A streamed answer is in `chat_stream`.
"""

from collections.abc import Sequence
from typing import Any

from manege.protocols.base import Choice, InvalidRequest, ModelReply, ModelRequest, ReplyHead, ReplyStream
from manege.protocols.chat_messages import chat_messages
from manege.protocols.chat_stream import ChatStream
from manege.protocols.openai import (
    OpenAI,
    read_max_tool_calls,
    read_object,
    read_sampling,
    read_wants_usage,
    shown_logprob,
)
from manege.protocols.openai_reply import chat_finish, chat_tool_call, custom_names, reply_body
from manege.protocols.openai_tools import Choosing, allowed, custom_tool, forced, function_tool, plain_choice
from manege.protocols.values import flag, integer, objects
from manege.types import JsonObject

__all__ = ["ChatCompletions"]

_TOOL_KINDS = {"function": function_tool, "custom": custom_tool}


class ChatCompletions(OpenAI):
    """See `protocols.base.WireProtocol`."""

    name = "chat"

    def parse(self, raw: JsonObject) -> ModelRequest:
        _refuse_unsupported(raw)
        max_new_tokens = integer(raw.get("max_completion_tokens"), "max_completion_tokens", low=1) or integer(
            raw.get("max_tokens"), "max_tokens", low=1
        )
        tools, notes = _tools(raw.get("tools"))
        tool_choice, forced_tool, tools = _tool_choice(raw.get("tool_choice"), tools)
        return ModelRequest(
            messages=chat_messages(raw.get("messages")),
            tools=tools,
            tool_choice=tool_choice,
            forced_tool=forced_tool,
            max_tool_calls=read_max_tool_calls(raw),
            json_schema=_json_schema(raw.get("response_format")),
            sampling=read_sampling(raw, max_new_tokens=max_new_tokens),
            num_choices=integer(raw.get("n"), "n", low=1, high=128) or 1,
            stream=flag(raw.get("stream"), "stream"),
            wants_usage=read_wants_usage(raw),
            wants_logprobs=flag(raw.get("logprobs"), "logprobs"),
            wants_token_ids=flag(raw.get("return_token_ids"), "return_token_ids"),
            notes=notes,
            raw=raw,
        )

    def reply(self, request: ModelRequest, reply: ModelReply) -> JsonObject:
        custom = custom_names(request)
        choices = [_choice(index, choice, request, custom) for index, choice in enumerate(reply.choices)]
        body = reply_body(reply, id=f"chatcmpl-{reply.head.id}", kind="chat.completion", choices=choices)
        return body if reply.head.prompt_ids is None else body | {"prompt_token_ids": list(reply.head.prompt_ids)}

    def stream(self, request: ModelRequest, head: ReplyHead) -> ReplyStream:
        return ChatStream(request, head)


def _choice(index: int, choice: Choice, request: ModelRequest, custom: frozenset[str]) -> JsonObject:
    message: dict[str, Any] = {**choice.message, "refusal": None}
    if calls := choice.message.get("tool_calls"):
        message["tool_calls"] = [chat_tool_call(call, custom) for call in calls]
        message["content"] = message["content"] or None
    shown: dict[str, Any] = {"index": index, "message": message, "logprobs": None, **chat_finish(choice)}
    if request.wants_logprobs:
        shown["logprobs"] = {"content": [shown_logprob(token) for token in choice.logprobs], "refusal": None}
    if choice.response_ids is not None:
        shown["token_ids"] = list(choice.response_ids)
    return shown


def _refuse_unsupported(raw: JsonObject) -> None:
    for key in ("functions", "function_call"):
        if raw.get(key) not in (None, [], "none", "auto"):
            raise InvalidRequest(f"{key} is out of use; send tools and tool_choice", param=key)
    if integer(raw.get("top_logprobs"), "top_logprobs", low=0):
        raise InvalidRequest(
            "only the sampled token's log-probability is known; send logprobs without top_logprobs",
            param="top_logprobs",
        )


def _tools(value: Any) -> tuple[Sequence[JsonObject], Sequence[str]]:
    tools: list[JsonObject] = []
    notes: list[str] = []
    for index, tool in enumerate(objects(value, "tools")):
        kind, where = tool.get("type"), f"tools[{index}]"
        if isinstance(kind, str) and kind in _TOOL_KINDS:
            tools.append(_TOOL_KINDS[kind](read_object(tool.get(kind), f"{where}.{kind}"), f"{where}.{kind}"))
        elif isinstance(kind, str):
            notes.append(f"{where}: {kind} is a hosted tool, which we do not have; left out")
        else:
            raise InvalidRequest(f"{where} has no type; want 'function' or 'custom'", param=where)
    return tools, notes


def _tool_choice(choice: Any, tools: Sequence[JsonObject]) -> Choosing:
    if plain := plain_choice(choice, tools):
        return plain
    kind = choice.get("type")
    if kind == "allowed_tools":
        options = read_object(choice.get(kind), "tool_choice.allowed_tools")
        names = [_chosen(tool) for tool in objects(options.get("tools"), "tool_choice.tools")]
        return allowed(options.get("mode"), names, tools)
    return forced(_chosen(choice), tools)


def _chosen(choice: Any) -> Any:
    """The name in `{"type": "function", "function": {"name": ...}}` or the same with `custom`."""
    kind = read_object(choice, "tool_choice").get("type")
    if kind not in ("function", "custom"):
        raise InvalidRequest(f"tool_choice of type {kind!r} is not supported; name a function", param="tool_choice")
    return read_object(choice.get(kind), f"tool_choice.{kind}").get("name")


def _json_schema(value: Any) -> JsonObject | None:
    if value is None:
        return None
    kind = read_object(value, "response_format").get("type")
    if kind == "json_schema":
        where = "response_format.json_schema"
        return read_object(read_object(value.get(kind), where).get("schema"), f"{where}.schema")
    if kind not in ("text", "json_object"):
        raise InvalidRequest(
            f"response_format of type {kind!r} is not supported; want text, json_object or json_schema",
            param="response_format",
        )
    return {} if kind == "json_object" else None
