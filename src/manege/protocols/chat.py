"""OpenAI's chat completions, with vLLM's `return_token_ids`, `top_k` and `min_p`.

https://platform.openai.com/docs/api-reference/chat/create; messages become canonical here: text parts folded into one
string, `developer` read as `system`, cache markers and other decoration dropped.
"""

from collections.abc import Sequence
from typing import Any

from manege.errors import ManegeError
from manege.protocols.base import InvalidRequest, ModelReply, ModelRequest, TokenLogprob
from manege.protocols.openai import completion, error_body, read_bool, read_int, read_sampling, refuse_unsupported
from manege.types import FinishReason, JsonObject

__all__ = ["ChatCompletions"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatCompletions:
    """See `protocols.base.WireProtocol`."""

    name = "chat"

    def parse(self, raw: JsonObject) -> ModelRequest:
        refuse_unsupported(raw)
        max_new_tokens = read_int(raw, "max_completion_tokens", low=1) or read_int(raw, "max_tokens", low=1)
        return ModelRequest(
            messages=_messages(raw.get("messages")),
            tools=_tools(raw.get("tools")),
            max_tool_calls=_max_tool_calls(raw),
            sampling=read_sampling(raw, max_new_tokens=max_new_tokens),
            wants_logprobs=bool(read_bool(raw, "logprobs")),
            wants_token_ids=bool(read_bool(raw, "return_token_ids")),
            raw=raw,
        )

    def reply(self, reply: ModelReply) -> JsonObject:
        message = dict(reply.message)
        choice: dict[str, Any] = {"message": message}
        if message.get("tool_calls"):
            message["content"] = message["content"] or None
            if reply.finish_reason is not FinishReason.LENGTH:
                choice["finish_reason"] = "tool_calls"
        if reply.logprobs:
            choice["logprobs"] = {"content": [_shown(token) for token in reply.logprobs]}
        if reply.response_ids is not None:
            choice["token_ids"] = reply.response_ids
        body = completion(reply, prefix="chatcmpl", kind="chat.completion", choice=choice)
        return body if reply.response_ids is None else body | {"prompt_token_ids": reply.prompt_ids}

    def error(self, error: ManegeError) -> JsonObject:
        return error_body(error)


def _shown(token: TokenLogprob) -> JsonObject:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}


def _messages(value: Any) -> Sequence[JsonObject]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages is missing or empty; send a list of messages", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(value: Any, where: str) -> JsonObject:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        role = value.get("role") if isinstance(value, dict) else value
        raise InvalidRequest(f"{where}: role {role!r} is not one of {', '.join(_ROLES)}", param=where)
    role = _ROLES[value["role"]]
    message: dict[str, Any] = {"role": role, "content": _content(value.get("content"), f"{where}.content")}
    if isinstance(value.get("name"), str):
        message["name"] = value["name"]
    if role == "tool":
        if not isinstance(value.get("tool_call_id"), str):
            raise InvalidRequest(f"{where}: a tool message needs the tool_call_id that it answers", param=where)
        message["tool_call_id"] = value["tool_call_id"]
    if role == "assistant":
        if value.get("tool_calls"):
            message["tool_calls"] = _tool_calls(value["tool_calls"], f"{where}.tool_calls")
        reasoning = value.get("reasoning_content") or value.get("reasoning")
        if isinstance(reasoning, str):
            message["reasoning_content"] = reasoning
    elif value.get("content") is None:
        raise InvalidRequest(f"{where}: a {role} message needs content", param=f"{where}.content")
    return message


def _content(value: Any, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} is a {type(value).__name__}; want a string or a list of parts", param=where)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{where}[{index}]: parts of type {kind!r} are not supported; this model reads text only",
                param=f"{where}[{index}]",
            )
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(value: Any, where: str) -> Sequence[JsonObject]:
    calls = []
    for index, call in enumerate(value if isinstance(value, list) else [value]):
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(call.get("id"), str)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments"), str)
        ):
            raise InvalidRequest(
                f"{where}[{index}] needs an id, function.name and function.arguments, all strings",
                param=f"{where}[{index}]",
            )
        function = {"name": function["name"], "arguments": function["arguments"]}
        calls.append({"id": call["id"], "type": "function", "function": function})
    return calls


def _tools(value: Any) -> Sequence[JsonObject]:
    tools = []
    for index, tool in enumerate(value if isinstance(value, list) else [] if value is None else [value]):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                f"tools[{index}]: want type 'function' and a function with a name", param=f"tools[{index}]"
            )
        kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        tools.append({"type": "function", "function": kept})
    return tools


def _max_tool_calls(raw: JsonObject) -> int | None:
    choice = raw.get("tool_choice") or "auto"
    if choice == "none":
        return 0
    if choice != "auto":
        raise InvalidRequest(
            f"tool_choice {choice!r} needs constrained decoding, which is not supported; send 'auto' or 'none'",
            param="tool_choice",
        )
    return 1 if read_bool(raw, "parallel_tool_calls") is False else None
