"""Items of Responses to canonical messages.

One reply of ours is several items: reasoning, message, calls. In a later request they come back next to each other and
are folded into the one assistant message that they came from. Items of different replies that stand next to each other
are told apart by our item ids, `<kind>_<call>_<position>`, and by the encrypted content of reasoning, the call's id;
a caller that drops both gets them as one message.
"""

from collections.abc import Sequence
from typing import Any

from manege.protocols.base import InvalidRequest
from manege.protocols.chat_messages import image_part
from manege.protocols.openai import read_object, read_text
from manege.protocols.openai_tools import custom_arguments
from manege.protocols.responses_tools import DeclaredTools
from manege.protocols.values import canonical_call, folded, text_part
from manege.types import JsonObject

__all__ = ["ItemReader"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class ItemReader:
    """Reads items one after the other into `messages`; what is left out is in `notes`."""

    def __init__(self, declared: DeclaredTools) -> None:
        self.messages: list[JsonObject] = []
        self.notes: list[str] = []
        self._declared = declared
        self._reply: dict[str, Any] | None = None
        """The assistant message that is being put together; the last of `messages`."""
        self._call: str | None = None
        """The call that it came from, where that is known."""

    def read(self, value: Any, where: str) -> None:
        """Raises InvalidRequest."""
        item = read_object(value, where)
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._extend(item, {"reasoning_content": _reasoning(item)})
        elif kind in ("function_call", "custom_tool_call"):
            self._extend(item, {"tool_calls": [self._tool_call(item, where)]})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(item.get("output"), f"{where}.output")
            self._add({"role": "tool", "content": content, "tool_call_id": read_text(item, "call_id", where)})
        elif kind == "item_reference":
            raise InvalidRequest(f"{where}: items are not kept here; send the item itself", param=where)
        elif kind != "additional_tools":
            self.notes.append(f"{where}: items of type {kind!r} mean nothing to the model; left out")

    def _message(self, item: JsonObject, where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidRequest(f"{where}: role {role!r} is not one of {', '.join(_ROLES)}", param=where)
        content = item.get("content")
        if role == "assistant":
            self._extend(item, {"content": _assistant_text(content, f"{where}.content")})
        else:
            self._add({"role": _ROLES[role], "content": _content(content, f"{where}.content")})

    def _add(self, message: JsonObject) -> None:
        self.messages.append(message)
        self._reply = self._call = None

    def _extend(self, item: JsonObject, more: JsonObject) -> None:
        """Add to the current reply, or begin one."""
        call = _call_of(item)
        if self._reply is None or (call is not None and self._call is not None and call != self._call):
            self._reply, self._call = {"role": "assistant", "content": ""}, None
            self.messages.append(self._reply)
        self._call = self._call or call
        for key, value in more.items():
            if value:
                self._reply[key] = self._reply[key] + value if key in self._reply else value

    def _tool_call(self, item: JsonObject, where: str) -> JsonObject:
        if item["type"] == "custom_tool_call":
            arguments = custom_arguments(read_text(item, "input", where))
        else:
            arguments = read_text(item, "arguments", where)
        name = self._declared.flat_name(item.get("namespace"), read_text(item, "name", where))
        return canonical_call(read_text(item, "call_id", where), name, arguments)


def _call_of(item: JsonObject) -> str | None:
    """The call of ours that an item came from; None where its id is not one of ours."""
    hidden = item.get("encrypted_content")
    if item.get("type") == "reasoning" and isinstance(hidden, str):
        return hidden
    parts = item["id"].split("_") if isinstance(item.get("id"), str) else ()
    return parts[1] if len(parts) == 3 else None


def _reasoning(item: JsonObject) -> str:
    """The reasoning itself where the caller has it, else its summary, which for our own replies is the same."""
    for key in ("content", "summary"):
        parts = item.get(key)
        found = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if text := "\n".join(text for text in found if isinstance(text, str)):
            return text
    return ""


def _assistant_text(value: Any, where: str) -> str:
    """Parts of a reply follow each other without a gap: that is how the reply was cut into them."""
    content = _parts(value, where)
    if any(part["type"] != "text" for part in content):
        raise InvalidRequest(f"{where}: an assistant message holds text only", param=where)
    return "".join(part["text"] for part in content)


def _content(value: Any, where: str) -> str | Sequence[JsonObject]:
    return folded(_parts(value, where))


def _parts(value: Any, where: str) -> Sequence[JsonObject]:
    if isinstance(value, str):
        return [text_part(value)]
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} is a {type(value).__name__}; want a string or a list of parts", param=where)
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(value)]


def _part(value: Any, where: str) -> JsonObject:
    part = read_object(value, where)
    kind = part.get("type")
    if kind == "input_image":
        return image_part(part.get("image_url"), part.get("detail"), where)
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InvalidRequest(f"{where}: a part of type {kind!r} is not supported; send text or images", param=where)
    return text_part(read_text(part, _TEXT_PARTS[kind], where))
