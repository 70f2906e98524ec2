"""Tools and schemas of the Gemini API to functions with JSON schemas.

Gemini's `Schema` is JSON schema with other spellings: upper-case types, `nullable`, int64 bounds as strings, snake_case
or camelCase keywords, `defs` and `ref` without the dollar sign. `parametersJsonSchema` is JSON schema already.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manege.protocols.base import ToolChoice
from manege.protocols.gemini_contents import camel, mapping
from manege.protocols.values import integer, objects, shown, text, texts, wrong
from manege.types import JsonObject

__all__ = ["Tools", "json_schema", "read_tools"]

_MODES: dict[str, ToolChoice] = {
    "MODE_UNSPECIFIED": "auto",
    "AUTO": "auto",
    "VALIDATED": "auto",
    "ANY": "required",
    "NONE": "none",
}
_DROPPED = frozenset({"nullable", "example", "propertyOrdering"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_MAX_DEPTH = 64
"""Levels of a schema: far more than any tool has, far fewer than Python's recursion allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What may be called."""

    functions: list[JsonObject]
    choice: ToolChoice
    forced: str | None


def read_tools(tools: Any, config: Any, notes: list[str]) -> Tools:
    """`config`: the `toolConfig`. Where it allows several functions, only these are offered, in the prompt too, since
    that is what keeps the model from calling another; where it demands one, the prompt stays as it is."""
    functions = _functions(tools, notes)
    where = "toolConfig.functionCallingConfig"
    calling = mapping(mapping(config, "toolConfig").get("functionCallingConfig"), where)
    mode = text(calling.get("mode") or "AUTO", f"{where}.mode").upper()
    if mode not in _MODES:
        raise wrong(f"{where}.mode", f"is {shown(mode)}; want one of {', '.join(_MODES)}")
    allowed = texts(calling.get("allowedFunctionNames"), f"{where}.allowedFunctionNames")
    if mode not in ("ANY", "VALIDATED") or not allowed:
        return Tools(functions=functions, choice=_MODES[mode], forced=None)
    if mode == "ANY" and len(allowed) == 1:
        return Tools(functions=functions, choice="required", forced=allowed[0])
    offered = [tool for tool in functions if tool["function"]["name"] in allowed]
    if missing := set(allowed) - {tool["function"]["name"] for tool in offered}:
        raise wrong(f"{where}.allowedFunctionNames", f"{shown(min(missing))} is not among the tools")
    if len(offered) < len(functions):
        notes.append(f"tools: {len(functions) - len(offered)} not in allowedFunctionNames are left out of the prompt")
    return Tools(functions=offered, choice=_MODES[mode], forced=None)


def json_schema(value: Any, where: str, *, depth: int = 0) -> JsonObject:
    """A Gemini schema as JSON schema."""
    if depth > _MAX_DEPTH:
        raise wrong(where, f"is nested deeper than {_MAX_DEPTH} levels")
    schema = mapping(value, where)
    converted: dict[str, Any] = {}
    for key, found in schema.items():
        if found is None or key in _DROPPED:
            continue
        converter = _KEYWORDS.get(key)
        if converter is not None:
            name, convert = converter
            converted[name] = convert(found, f"{where}.{name}", depth + 1)
        elif key in _COUNTS:
            converted[key] = integer(_from_int64(found), f"{where}.{key}", low=0)
        else:
            converted[key] = found
    if converted.get("type") == "type_unspecified":
        del converted["type"]
    if schema.get("nullable") is True:
        _allow_null(converted)
    return converted


def _functions(value: Any, notes: list[str]) -> list[JsonObject]:
    functions: list[JsonObject] = []
    for index, tool in enumerate(objects([value] if isinstance(value, dict) else value, "tools")):
        for key, declared in camel(tool).items():
            where = f"tools[{index}].{key}"
            if key == "functionDeclarations":
                for place, declaration in enumerate(objects(declared, where)):
                    functions.append(_function(declaration, f"{where}[{place}]"))
            elif declared is not None:
                notes.append(f"tools[{index}]: {shown(key)} is a tool of the provider; left out")
    return functions


def _function(value: JsonObject, where: str) -> JsonObject:
    declaration = mapping(value, where)
    function: dict[str, Any] = {"name": text(declaration.get("name"), f"{where}.name")}
    if declaration.get("description") is not None:
        function["description"] = text(declaration["description"], f"{where}.description")
    given = declaration.get("parametersJsonSchema")
    if given is not None:
        mapping(given, f"{where}.parametersJsonSchema")
        function["parameters"] = given
    elif declaration.get("parameters") is not None:
        function["parameters"] = json_schema(declaration["parameters"], f"{where}.parameters")
    return {"type": "function", "function": function}


def _from_int64(value: Any) -> Any:
    is_number = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20
    return int(value) if is_number else value


def _type(value: Any, where: str, depth: int) -> Any:
    if isinstance(value, list):
        return [item.lower() for item in texts(value, where)]
    return text(value, where).lower()


def _one(value: Any, where: str, depth: int) -> Any:
    # `additionalProperties` may be a boolean.
    return value if isinstance(value, bool) else json_schema(value, where, depth=depth)


def _list(value: Any, where: str, depth: int) -> Any:
    return [json_schema(item, f"{where}[{index}]", depth=depth) for index, item in enumerate(objects(value, where))]


def _named(value: Any, where: str, depth: int) -> Any:
    if not isinstance(value, dict):
        raise wrong(where, f"is {shown(value)}; want an object")
    return {name: json_schema(item, f"{where}.{name}", depth=depth) for name, item in value.items()}


def _reference(value: Any, where: str, depth: int) -> Any:
    return text(value, where).replace("#/defs/", "#/$defs/", 1)


_KEYWORDS: dict[str, tuple[str, Callable[[Any, str, int], Any]]] = {
    "type": ("type", _type),
    "properties": ("properties", _named),
    "defs": ("$defs", _named),
    "$defs": ("$defs", _named),
    "ref": ("$ref", _reference),
    "$ref": ("$ref", _reference),
    "items": ("items", _one),
    "additionalProperties": ("additionalProperties", _one),
    "anyOf": ("anyOf", _list),
    "prefixItems": ("prefixItems", _list),
}


def _allow_null(schema: dict[str, Any]) -> None:
    if "anyOf" in schema:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], None]
