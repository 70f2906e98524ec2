"""Tools of OpenAI's protocols: declarations, `tool_choice`, and free-text (`custom`) tools as functions and back.

Chat completions nest a tool's fields under its type, Responses does not; the caller passes the fields. A `custom` tool
takes free text. To the model it is a function with one string parameter, `input`; to the caller it is what it was.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from manege.protocols.base import InvalidRequest, ToolChoice
from manege.protocols.openai import read_object, read_text
from manege.protocols.values import shown, wrong
from manege.types import JsonObject

__all__ = [
    "Choosing",
    "allowed",
    "custom_arguments",
    "custom_input",
    "custom_tool",
    "forced",
    "function_tool",
    "plain_choice",
]

Choosing = tuple[ToolChoice, str | None, Sequence[JsonObject]]
"""Tool choice, the name of the forced tool, and the tools that are left."""


def function_tool(fields: JsonObject, where: str, name: str | None = None) -> JsonObject:
    """A canonical tool; `name` replaces the declared one."""
    kept: dict[str, Any] = {"name": name or _name(fields, where)}
    for key, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        value = fields.get(key)
        if value is not None:
            if not isinstance(value, kind):
                raise wrong(f"{where}.{key}", f"is {shown(value)}; want a {kind.__name__}")
            kept[key] = value
    return {"type": "function", "function": kept}


def custom_tool(fields: JsonObject, where: str, name: str | None = None) -> JsonObject:
    """A free-text tool as a canonical function. A grammar for its text is told to the model in words."""
    name = name or _name(fields, where)
    text_format = fields.get("format")
    about = "The text that the tool takes."
    if isinstance(text_format, dict) and text_format.get("type") == "grammar":
        grammar = read_object(text_format.get("grammar", text_format), f"{where}.format.grammar")
        about += f" It must match this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": about}},
        "required": ["input"],
        "additionalProperties": False,
    }
    description = fields.get("description")
    return function_tool({"description": description, "parameters": schema}, where, name)


def custom_arguments(text: str) -> str:
    """The canonical arguments of a call of a free-text tool."""
    return orjson.dumps({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """The reverse; arguments that are not of that form are the text itself."""
    try:
        text = orjson.loads(arguments)["input"]
    except (ValueError, TypeError, KeyError, IndexError):
        return arguments
    return text if isinstance(text, str) else arguments


def forced(name: Any, tools: Sequence[JsonObject]) -> Choosing:
    """The choice of one tool by name. Raises InvalidRequest if there is none of that name."""
    if name not in (known := _names(tools)):
        raise InvalidRequest(f"tool_choice names {shown(name)}; the tools are {known}", param="tool_choice")
    return "required", name, tools


def allowed(mode: Any, names: Sequence[Any], tools: Sequence[JsonObject]) -> Choosing:
    """The choice among some of the tools: the others are left out of the prompt, or one is forced."""
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"tool_choice mode is {shown(mode)}; want 'auto' or 'required'", param="tool_choice")
    if missing := [name for name in names if name not in _names(tools)]:
        raise InvalidRequest(f"tool_choice allows {missing}; the tools are {_names(tools)}", param="tool_choice")
    if mode == "required" and len(names) == 1:
        return forced(names[0], tools)
    return mode, None, [tool for tool in tools if tool["function"]["name"] in names]


def plain_choice(choice: Any, tools: Sequence[JsonObject]) -> Choosing | None:
    """A choice that is a word; None for one that is an object."""
    if isinstance(choice, Mapping):
        return None
    if choice not in (None, "auto", "none", "required"):
        raise InvalidRequest(
            f"tool_choice is {shown(choice)}; want auto, none, required or an object", param="tool_choice"
        )
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice is 'required' but there are no tools to call", param="tool_choice")
    return choice or "auto", None, tools


def _name(fields: JsonObject, where: str) -> str:
    if not (name := read_text(fields, "name", where)):
        raise InvalidRequest(f"{where}.name is empty; name the tool", param=f"{where}.name")
    return name


def _names(tools: Sequence[JsonObject]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]
