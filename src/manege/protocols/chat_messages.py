"""Messages of chat completions to canonical ones: text parts folded into one string, `developer` read as `system`,
cache markers and other decoration dropped, images kept, calls of free-text tools turned into function calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from manege.protocols.base import InvalidRequest
from manege.protocols.openai import read_object, read_text
from manege.protocols.openai_tools import custom_arguments
from manege.protocols.values import canonical_call, folded, text_part
from manege.types import JsonObject

__all__ = ["chat_messages", "image_part"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def chat_messages(value: Any) -> Sequence[JsonObject]:
    """Raises InvalidRequest."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages is missing or empty; send a list of messages", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def image_part(url: Any, detail: Any, where: str) -> JsonObject:
    """A canonical image; `url` may be a data URL."""
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{where} needs the image's url, a string", param=where)
    extra = {"detail": detail} if isinstance(detail, str) else {}
    return {"type": "image_url", "image_url": {"url": url, **extra}}


def _message(value: Any, where: str) -> JsonObject:
    role = value.get("role") if isinstance(value, dict) else value
    if not isinstance(value, dict) or not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}: role {role!r} is not one of {', '.join(_ROLES)}", param=where)
    role = _ROLES[role]
    content = value.get("content")
    if role == "assistant" and content is None:
        content = value.get("refusal")
    message: dict[str, Any] = {"role": role, "content": _content(content, f"{where}.content")}
    if isinstance(value.get("name"), str):
        message["name"] = value["name"]
    if role == "tool":
        message["tool_call_id"] = read_text(value, "tool_call_id", where)
    if role == "assistant":
        if value.get("function_call"):
            raise InvalidRequest(f"{where}: function_call is out of use; send tool_calls", param=where)
        if value.get("tool_calls"):
            message["tool_calls"] = _tool_calls(value["tool_calls"], f"{where}.tool_calls")
        if reasoning := _reasoning(value):
            message["reasoning_content"] = reasoning
    elif content is None:
        raise InvalidRequest(f"{where}: a {role} message needs content", param=f"{where}.content")
    return message


def _reasoning(value: JsonObject) -> str:
    """The three spellings in use: vLLM's two, and OpenRouter's list of details."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(value.get(key), str) and value[key]:
            return value[key]
    details = value.get("reasoning_details")
    found = [part for part in details if isinstance(part, dict)] if isinstance(details, list) else []
    texts = [part.get("text") or part.get("summary") for part in found]
    return "\n".join(text for text in texts if isinstance(text, str))


def _content(value: Any, where: str) -> str | Sequence[JsonObject]:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} is a {type(value).__name__}; want a string or a list of parts", param=where)
    return folded([_part(part, f"{where}[{index}]") for index, part in enumerate(value)])


def _part(part: Any, where: str) -> JsonObject:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url":
        image = part.get("image_url")
        image = image if isinstance(image, Mapping) else {"url": image}
        return image_part(image.get("url"), image.get("detail"), where)
    if kind in ("text", "refusal") and isinstance(part.get(kind), str):
        return text_part(part[kind])
    raise InvalidRequest(f"{where}: a part of type {kind!r} is not supported; send text or image_url", param=where)


def _tool_calls(value: Any, where: str) -> Sequence[JsonObject]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} is a {type(value).__name__}; want a list", param=where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(value)]


def _tool_call(value: Any, where: str) -> JsonObject:
    call = read_object(value, where)
    if call.get("type") == "custom":
        custom = read_object(call.get("custom"), f"{where}.custom")
        name = read_text(custom, "name", f"{where}.custom")
        arguments = custom_arguments(read_text(custom, "input", f"{where}.custom"))
    else:
        function = read_object(call.get("function"), f"{where}.function")
        name = read_text(function, "name", f"{where}.function")
        arguments = read_text(function, "arguments", f"{where}.function")
    return canonical_call(read_text(call, "id", where), name, arguments)
