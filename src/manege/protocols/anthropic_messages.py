"""Messages of the Anthropic API to canonical ones.

One user turn may hold several tool results and text: it becomes `tool` messages and a user message, in the same order.
An assistant turn becomes one message; texts (and thoughts) that stand apart in it are joined without a separator, since
an answer whose text goes on after a tool call is streamed as two blocks. Cache markers, citations and signatures are
dropped. Content that this model could not be given is refused.
"""

import re
from typing import Any

from manege.protocols.base import InvalidRequest
from manege.protocols.values import (
    arguments_text,
    canonical_call,
    folded,
    image_part,
    objects,
    shown,
    text,
    text_part,
    wrong,
)
from manege.types import JsonObject

__all__ = ["canonical_id", "read_messages", "read_system", "wire_id"]


def canonical_id(wire: str) -> str:
    """`toolu_x` as `call_x`; an id that is not of our making stays as it is."""
    return re.sub(r"^toolu_(?=[A-Za-z0-9]+\Z)", "call_", wire)


def wire_id(canonical: str) -> str:
    """`call_x` as `toolu_x`."""
    return re.sub(r"^call_(?=[A-Za-z0-9]+\Z)", "toolu_", canonical)


def read_system(value: Any) -> list[JsonObject]:
    """The `system` field: a string or text blocks; no message when there is no text."""
    content = _system_text(value, "system") if value else ""
    return [{"role": "system", "content": content}] if content else []


def read_messages(value: Any, notes: list[str]) -> list[JsonObject]:
    """`notes` gets a line for what is left out."""
    messages: list[JsonObject] = []
    for index, message in enumerate(objects(value, "messages")):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        where_content = f"{where}.content"
        if role == "user":
            messages += _user_turn(_blocks(content, where_content), where_content)
        elif role == "assistant":
            messages.append(_assistant_turn(_blocks(content, where_content), where_content, notes))
        elif role == "system":
            messages.append({"role": "system", "content": _system_text(content, where_content)})
        else:
            raise wrong(where, f"role {shown(role)} is not one of user, assistant, system")
    if not messages:
        raise wrong("messages", "is missing or empty; send a list of messages")
    return messages


def _blocks(value: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise wrong(where, f"is {shown(value)}; want a string or a list of blocks")
    return objects(value, where)


def _system_text(value: Any, where: str) -> str:
    content = folded(_parts(_blocks(value, where), where))
    if not isinstance(content, str):
        raise wrong(where, "holds an image; a system message is text only")
    return content


def _user_turn(blocks: list[dict[str, Any]], where: str) -> list[JsonObject]:
    messages: list[JsonObject] = []
    parts: list[JsonObject] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.get("type") != "tool_result":
            parts += _part(block, at)
            continue
        if parts:
            messages.append({"role": "user", "content": folded(parts)})
            parts = []
        messages.append(_tool_result(block, at))
    if parts or not messages:
        messages.append({"role": "user", "content": folded(parts)})
    return messages


def _tool_result(block: JsonObject, where: str) -> JsonObject:
    content = block.get("content")
    parts = _parts(_blocks("" if content is None else content, f"{where}.content"), f"{where}.content")
    # A harness writes what went wrong into the text; only where it did not, the flag is all there is.
    told = folded(parts) or ("error" if block.get("is_error") is True else "")
    call_id = canonical_id(text(block.get("tool_use_id"), f"{where}.tool_use_id"))
    return {"role": "tool", "tool_call_id": call_id, "content": told}


def _assistant_turn(blocks: list[dict[str, Any]], where: str, notes: list[str]) -> JsonObject:
    reasoning, content = "", ""
    calls: list[JsonObject] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        match block.get("type"):
            case "text":
                content += text(block.get("text"), f"{at}.text")
            case "thinking":
                reasoning += text(block.get("thinking"), f"{at}.thinking")
            case "redacted_thinking":
                notes.append(f"{at}: redacted thinking of another model is left out")
            case "tool_use":
                call_id = canonical_id(text(block.get("id"), f"{at}.id"))
                arguments = arguments_text(block.get("input"), f"{at}.input")
                calls.append(canonical_call(call_id, text(block.get("name"), f"{at}.name"), arguments))
            case kind:
                raise _wrong_block(kind, at)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _parts(blocks: list[dict[str, Any]], where: str) -> list[JsonObject]:
    return [part for index, block in enumerate(blocks) for part in _part(block, f"{where}[{index}]")]


def _part(block: JsonObject, where: str) -> list[JsonObject]:
    match block.get("type"):
        case "document":
            return _titled(block, ("title", "context"), where) + _document(block.get("source"), f"{where}.source")
        case "search_result":
            return _titled(block, ("title", "source"), where) + _inner(block.get("content"), f"{where}.content")
        case "tool_reference":
            # Deferred tools stand in the prompt from the start, so their name is all that is new.
            return [text_part(text(block.get("tool_name"), f"{where}.tool_name"))]
    return [_text_or_image(block, where)]


def _inner(value: Any, where: str) -> list[JsonObject]:
    """Content of a block; no block is nested deeper."""
    return [_text_or_image(block, f"{where}[{index}]") for index, block in enumerate(_blocks(value, where))]


def _text_or_image(block: JsonObject, where: str) -> JsonObject:
    match block.get("type"):
        case "text":
            return text_part(text(block.get("text"), f"{where}.text"))
        case "image":
            return _image(block.get("source"), f"{where}.source")
        case kind:
            raise _wrong_block(kind, where)


def _titled(block: JsonObject, keys: tuple[str, ...], where: str) -> list[JsonObject]:
    return [text_part(text(block[key], f"{where}.{key}")) for key in keys if block.get(key)]


def _image(source: Any, where: str) -> JsonObject:
    match source:
        case {"type": "base64", "media_type": media_type, "data": data}:
            return image_part(media_type, data, where)
        case {"type": "url", "url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
    raise wrong(where, "is not supported; send the image as base64 with its media_type, or by url")


def _document(source: Any, where: str) -> list[JsonObject]:
    match source:
        case {"type": "text", "data": str(data)}:
            return [text_part(data)]
        case {"type": "content", "content": str() | list() as content}:
            return _inner(content, f"{where}.content")
    raise wrong(where, "is not supported; send the document as text")


def _wrong_block(kind: Any, where: str) -> InvalidRequest:
    return wrong(where, f"a block of type {shown(kind)} cannot be given to this model here; leave it out")
