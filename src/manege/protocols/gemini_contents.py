"""Contents of the Gemini API to canonical messages.

Clients that stream store every piece they got as a content of its own, so model contents in a row are one assistant
message, their texts joined without a separator. Calls often carry no id: they get one by their place in the history,
which only grows, and a response without a known id answers the first open call of its name. A response becomes the JSON
text of its `response` object.

Keys are read in both spellings, `inlineData` and `inline_data`. Content that this model could not be given is refused.
"""

import re
from collections.abc import Mapping, Sequence
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
    to_json,
    wrong,
)
from manege.types import JsonObject

__all__ = ["camel", "mapping", "read_contents", "read_system"]

_DECORATION = frozenset({"thought", "thoughtSignature", "videoMetadata", "mediaResolution", "partMetadata"})

_Part = tuple[str, JsonObject]
"""Where it stands, and its fields in camelCase."""


def camel(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object with the names of its fields as `camelCase`."""
    return {re.sub(r"(?<=[a-z0-9])_([a-z])", lambda found: found[1].upper(), key): value[key] for key in value}


def mapping(value: Any, where: str) -> dict[str, Any]:
    """An object with camelCase names; empty when absent."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(where, f"is {shown(value)}; want an object")
    return camel(value)


def read_system(value: Any, where: str) -> list[JsonObject]:
    """A string, a content, a part, or a list of strings and parts; no message when there is no text."""
    if isinstance(value, dict) and "parts" in value:
        value = value["parts"]
    items = value if isinstance(value, list) else [] if value is None else [value]
    lines = []
    for index, item in enumerate(items):
        at = f"{where}.parts[{index}]"
        lines.append(item if isinstance(item, str) else text(mapping(item, at).get("text"), f"{at}.text"))
    content = "\n".join(lines)
    return [{"role": "system", "content": content}] if content else []


def read_contents(value: Any, where: str) -> Sequence[JsonObject]:
    """Raises InvalidRequest when there is nothing."""
    reader = _Reader()
    for index, content in enumerate(objects([value] if isinstance(value, dict) else value, where)):
        at = f"{where}[{index}]"
        role = content.get("role") or "user"
        parts = [(f"{at}.parts[{place}]", camel(part)) for place, part in enumerate(_parts(content, f"{at}.parts"))]
        if role == "model":
            reader.model_turn(parts)
        elif role in ("user", "function"):
            reader.user_turn(parts)
        else:
            raise wrong(f"{at}.role", f"is {shown(role)}; want user, model or function")
    if not reader.messages:
        raise wrong(where, "is missing or empty; send a list of contents")
    return reader.messages


class _Reader:
    """The messages so far, and the calls that wait for a response."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._open_calls: list[tuple[str, str]] = []
        """Id and name."""
        self._num_calls = 0

    def model_turn(self, parts: Sequence[_Part]) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        message = self.messages[-1]
        for where, part in parts:
            match _kind(part, where):
                case "text":
                    key = "reasoning_content" if part.get("thought") else "content"
                    if added := text(part["text"], f"{where}.text"):
                        message[key] = message.get(key, "") + added
                case "functionCall":
                    call = self._call(mapping(part["functionCall"], where), f"{where}.functionCall")
                    message.setdefault("tool_calls", []).append(call)
                case kind:
                    if kind is not None:
                        raise _wrong_part(kind, where)

    def user_turn(self, parts: Sequence[_Part]) -> None:
        pending: list[JsonObject] = []
        num_before = len(self.messages)
        for where, part in parts:
            kind = _kind(part, where)
            if kind != "functionResponse":
                pending += [] if kind is None else [_media_or_text(kind, part, where)]
                continue
            if pending:
                self.messages.append({"role": "user", "content": folded(pending)})
                pending = []
            where = f"{where}.functionResponse"
            self.messages.append(self._response(mapping(part["functionResponse"], where), where))
        if pending or len(self.messages) == num_before:
            self.messages.append({"role": "user", "content": folded(pending)})

    def _call(self, call: JsonObject, where: str) -> JsonObject:
        name = text(call.get("name"), f"{where}.name")
        call_id = text(call["id"], f"{where}.id") if call.get("id") else f"call_{self._num_calls}"
        self._num_calls += 1
        self._open_calls.append((call_id, name))
        return canonical_call(call_id, name, arguments_text(call.get("args"), f"{where}.args"))

    def _response(self, response: JsonObject, where: str) -> dict[str, Any]:
        told_id = text(response["id"], f"{where}.id") if response.get("id") else None
        name = response.get("name")
        by_id = [call for call in self._open_calls if call[0] == told_id]
        answered = by_id or [call for call in self._open_calls if call[1] == name]
        if answered:
            self._open_calls.remove(answered[0])
        elif told_id is None:
            raise wrong(where, f"answers no open call of {shown(name)}; send the functionCall before it")
        result = response.get("response")
        mapping(result, f"{where}.response")
        parts = [text_part(to_json(result or {}, f"{where}.response"))]
        for index, media in enumerate(_parts(response, f"{where}.parts")):
            at = f"{where}.parts[{index}]"
            kind = _kind(camel(media), at)
            parts += [] if kind is None else [_media_or_text(kind, camel(media), at)]
        return {"role": "tool", "tool_call_id": answered[0][0] if answered else told_id, "content": folded(parts)}


def _parts(holder: JsonObject, where: str) -> list[dict[str, Any]]:
    parts = holder.get("parts")
    return objects([parts] if isinstance(parts, dict) else parts, where)


def _kind(part: JsonObject, where: str) -> str | None:
    """The one field that says what a part is; None for a part that only carries a signature."""
    kinds = [key for key, value in part.items() if value is not None and key not in _DECORATION]
    if len(kinds) > 1:
        raise wrong(where, f"has {', '.join(map(shown, kinds))}; a part holds one thing")
    return kinds[0] if kinds else None


def _media_or_text(kind: str, part: JsonObject, where: str) -> JsonObject:
    if kind == "text":
        return text_part(text(part["text"], f"{where}.text"))
    where = f"{where}.{kind}"
    if kind == "inlineData":
        blob = mapping(part[kind], where)
        return image_part(blob.get("mimeType"), blob.get("data"), where)
    if kind == "fileData":
        file = mapping(part[kind], where)
        if not text(file.get("mimeType") or "image/", f"{where}.mimeType").startswith("image/"):
            raise wrong(where, f"media of type {shown(file['mimeType'])} is not supported; send text or images")
        return {"type": "image_url", "image_url": {"url": text(file.get("fileUri"), f"{where}.fileUri")}}
    raise _wrong_part(kind, where)


def _wrong_part(kind: str, where: str) -> InvalidRequest:
    return wrong(where, f"a part with {shown(kind)} cannot be given to this model here; leave it out")
