"""Tool calls in the text of an answer, found while it is written.

A scanner takes the text of an answer piece by piece and gives back pieces of text and whole calls, in order. What is
cut or malformed comes back as the text that it is, so nothing that the model said is lost. A call of a tool that was
not offered is a call: the agent answers it with an error that the model can learn from.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from manege.rendering.base import ToolCall
from manege.rendering.text import cut
from manege.types import JsonObject

__all__ = ["PYTHON_TAG", "BareCalls", "CallScanner", "ReadCall", "TaggedCalls", "read_json", "read_xml", "schema_types"]

PYTHON_TAG = "<|python_tag|>"
"""Llama 3 may write it before its calls."""

ReadCall = Callable[[str], ToolCall | None]
"""The text of one call to the call; None if it is malformed."""

_SPACE = re.compile(r"[ \t\r\n]*")
_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>\s*(.*?)\s*</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_SEPARATORS = " \t\r\n;"


class CallScanner(Protocol):
    """Implementations: calls between tags, and bare JSON."""

    def push(self, text: str) -> Iterator[str | ToolCall]:
        """What is certain after this text."""
        ...

    def end(self) -> str:
        """The text that was kept back and did not become a call."""
        ...


class TaggedCalls:
    """Calls between two tags, anywhere in the text."""

    def __init__(self, opener: str, closer: str, read: ReadCall) -> None:
        self._opener, self._closer, self._read = opener, closer, read
        self._body: list[str] | None = None
        """Pieces of the call that is open; None outside of calls."""
        self._held = ""

    def push(self, text: str) -> Iterator[str | ToolCall]:
        self._held += text
        while True:
            if self._body is None:
                before, tag, self._held = cut(self._held, (self._opener,))
                if before:
                    yield before
                if tag is None:
                    return
                self._body = []
            inside, tag, self._held = cut(self._held, (self._closer,))
            self._body.append(inside)
            if tag is None:
                return
            body, self._body = "".join(self._body), None
            yield self._read(body) or f"{self._opener}{body}{self._closer}"

    def end(self) -> str:
        return self._held if self._body is None else "".join([self._opener, *self._body, self._held])


class BareCalls:
    """Llama 3's form: JSON objects at the very start of the answer, behind a python tag or not, with `;` or white
    space between them. From the first thing on that is no call, everything is text."""

    def __init__(self, read: ReadCall) -> None:
        self._read = read
        self._held: list[str] = []
        """Characters since the last call."""
        self._lead = ""
        """Those before an object, without separators: nothing, the tag or a part of it."""
        self._object: list[str] = []
        self._depth = 0
        self._quoted = self._escaped = self._is_text = self._has_called = False

    def push(self, text: str) -> Iterator[str | ToolCall]:
        if self._is_text:
            yield text
            return
        for position, char in enumerate(text):
            self._held.append(char)
            call = self._step(char)
            if call is not None:
                yield call
            if self._is_text:
                yield "".join(self._held) + text[position + 1 :]
                return

    def end(self) -> str:
        if self._is_text:
            return ""
        text = "".join(self._held)
        return "" if self._has_called and not text.strip(_SEPARATORS) else text

    def _step(self, char: str) -> ToolCall | None:
        if not self._depth:
            if char == "{" and self._lead in ("", PYTHON_TAG):
                self._depth, self._object = 1, [char]
            elif char not in _SEPARATORS or self._lead not in ("", PYTHON_TAG):
                self._lead += char
                self._is_text = not PYTHON_TAG.startswith(self._lead)
            return None
        self._object.append(char)
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return None
        self._quoted = char == '"'
        self._depth += (char == "{") - (char == "}")
        if self._depth:
            return None
        call = self._read("".join(self._object))
        if call is None:
            self._is_text = True
        else:
            self._held, self._lead, self._has_called = [], "", True
        return call


def read_json(text: str, *, needs_arguments: bool = False) -> ToolCall | None:
    """`{"name": ..., "arguments": {...}}`; the arguments stay byte for byte as they were written."""
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return None
        key = next((key for key in ("arguments", "parameters") if key in call), None)
        if key is None and needs_arguments:
            return None
        arguments = "{}" if key is None else call[key] if isinstance(call[key], str) else _member(text, key)
        # Escapes may name halves of a character, which no JSON of ours can carry.
        f"{call['name']}{arguments}".encode()
        return ToolCall(name=call["name"], arguments=arguments)
    except (ValueError, RecursionError):
        return None


def read_xml(text: str, tools: Sequence[JsonObject]) -> ToolCall | None:
    """`<function=name><parameter=key>value</parameter></function>`; the tool's schema says which values are strings."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return None
    properties = _properties(function[1], tools)
    members: dict[str, str] = {}
    position = 0
    while position < len(function[2]):
        parameter = _PARAMETER.match(function[2], position)
        if parameter is None:
            return None
        members[parameter[1]] = _json_value(parameter[2], properties.get(parameter[1]))
        position = parameter.end()
    inside = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items())
    return ToolCall(name=function[1], arguments=f"{{{inside}}}")


def _member(text: str, key: str) -> str:
    """The text of a member's value in a text that is a JSON object and has it; of the last one if there are several."""
    decoder, found = json.JSONDecoder(), ""
    position = text.index("{")
    while text[position] != "}":
        name, position = decoder.raw_decode(text, _after_space(text, position + 1))
        start = _after_space(text, _after_space(text, position) + 1)
        _, position = decoder.raw_decode(text, start)
        if name == key:
            found = text[start:position]
        position = _after_space(text, position)
    return found


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _properties(name: str, tools: Sequence[JsonObject]) -> JsonObject:
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = (tool["function"].get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _json_value(text: str, schema: Any) -> str:
    """A parameter as JSON: the text itself where it is JSON of a type that the schema allows, else a string."""
    types = schema_types(schema)
    if types != {"string"}:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
        else:
            if "string" not in types or _type(value) in types - {"string"}:
                return text.strip()
    return json.dumps(text, ensure_ascii=False)


def schema_types(schema: Any) -> set[str]:
    """The JSON types that a schema names; integers are numbers."""
    if not isinstance(schema, dict):
        return set()
    named = [schema["type"]] if isinstance(schema.get("type"), str) else _items(schema, "type")
    found = {"number" if name == "integer" else str(name) for name in named}
    found |= {_type(value) for value in [*_items(schema, "enum"), *([schema["const"]] if "const" in schema else [])]}
    return found.union(*map(schema_types, [*_items(schema, "anyOf"), *_items(schema, "oneOf")]))


def _items(schema: JsonObject, key: str) -> list[Any]:
    items = schema.get(key)
    return items if isinstance(items, list) else []


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    return {str: "string", int: "number", float: "number", list: "array", dict: "object"}[type(value)]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
