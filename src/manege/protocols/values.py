"""Checked values out of a JSON body, and what Messages and Gemini share: images, and tool arguments as objects.

Canonical arguments are the JSON text that the model wrote; on these wires they travel as an object. Text that is no
JSON object travels as `{"_raw": text}` and is read back as that text, so an echo always gives what was sampled.
Every reader names `where` the value stands and raises InvalidRequest.
"""

import math
from collections.abc import Sequence
from typing import Any

import orjson

from manege.protocols.base import InvalidRequest
from manege.types import JsonObject

__all__ = [
    "arguments_object",
    "arguments_text",
    "canonical_call",
    "flag",
    "folded",
    "image_part",
    "integer",
    "number",
    "objects",
    "shown",
    "text",
    "text_part",
    "texts",
    "to_json",
    "wrong",
]

_RAW = "_raw"
_MAX_INT = 2**63 - 1
"""What JSON writers, SQL and engines take."""


def wrong(where: str, problem: str) -> InvalidRequest:
    """The error to raise."""
    return InvalidRequest(f"{where}: {problem}", param=where)


def shown(value: Any) -> str:
    """A value for a message: short, whatever it is."""
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else f"{value!r:.80}"


def text(value: Any, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong(where, f"is {shown(value)}; want a string")
    return value


def texts(value: Any, where: str) -> list[str]:
    """A list of strings, without the empty ones; nothing when absent."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(where, f"is {shown(value)}; want a list of strings")
    return [item for index, item in enumerate(value) if text(item, f"{where}[{index}]")]


def flag(value: Any, where: str) -> bool:
    """A boolean; false when absent."""
    if value is not None and not isinstance(value, bool):
        raise wrong(where, f"is {shown(value)}; want true or false")
    return bool(value)


def number(value: Any, where: str, *, low: float, high: float) -> float | None:
    """A finite number between the two; None when absent."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(where, f"is {shown(value)}; want a number")
    if not low <= value <= high:
        raise wrong(where, f"is {shown(value)}; want a number between {low} and {high}")
    return float(value)


def integer(value: Any, where: str, *, low: int, high: int = _MAX_INT) -> int | None:
    """A whole number, also one written as 40.0; None when absent."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(where, f"is {shown(value)}; want an integer")
    if not low <= value <= high:
        wanted = f"at least {low}" if high == _MAX_INT and value < low else f"between {low} and {high}"
        raise wrong(where, f"is {shown(value)}; want an integer {wanted}")
    return value


def objects(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects; nothing when absent."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(where, f"is {shown(value)}; want a list of objects")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong(f"{where}[{index}]", f"is {shown(item)}; want an object")
    return value


def to_json(value: Any, where: str) -> str:
    """Compact JSON text."""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise wrong(where, f"cannot be written as JSON ({error}); send less depth and smaller numbers") from error


def arguments_object(arguments: str) -> JsonObject:
    """The object that stands for canonical arguments on the wire."""
    try:
        found = orjson.loads(arguments)
        # The writer allows less depth than the reader; a body puts the object some levels down.
        orjson.dumps([[[[[[[[found]]]]]]]])
    except (TypeError, ValueError):
        found = None
    return found if isinstance(found, dict) and _RAW not in found else {_RAW: arguments}


def arguments_text(value: Any, where: str) -> str:
    """Canonical arguments of an object on the wire."""
    if isinstance(value, dict) and len(value) == 1 and isinstance(value.get(_RAW), str):
        return value[_RAW]
    return to_json({} if value is None else value, where)


def canonical_call(call_id: str, name: str, arguments: str) -> JsonObject:
    """A tool call as it stands in a canonical assistant message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_part(value: str) -> JsonObject:
    """A part of canonical content."""
    return {"type": "text", "text": value}


def image_part(media_type: Any, data: Any, where: str) -> JsonObject:
    """An image given as base64, as a part of canonical content."""
    if not text(media_type, where).startswith("image/"):
        raise wrong(where, f"media of type {shown(media_type)} is not supported; send text or images")
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{text(data, where)}"}}


def folded(parts: Sequence[JsonObject]) -> str | list[JsonObject]:
    """Canonical content: one string, or the parts themselves where one of them is an image."""
    if any(part["type"] != "text" for part in parts):
        return list(parts)
    return "\n".join(part["text"] for part in parts)
