"""Tools of Responses: functions, free-text tools, both also inside a `namespace`; hosted tools are left out and noted.

A namespace is a group of tools, `{"type": "namespace", "name": ..., "tools": [...]}`, whose names are unique only
within it; a call then carries `namespace` and `name`. The model sees one flat list: the bare name where it is unique,
else `<namespace>__<name>`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manege.protocols.base import InvalidRequest
from manege.protocols.openai import read_text
from manege.protocols.openai_tools import Choosing, allowed, custom_tool, forced, function_tool, plain_choice
from manege.protocols.values import objects
from manege.types import JsonObject

__all__ = ["CallerTool", "DeclaredTools", "declared_tools", "responses_tool_choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerTool:
    """A tool as its caller knows it."""

    namespace: str | None
    name: str
    is_custom: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTools:
    """All tools of a request."""

    tools: Sequence[JsonObject]
    """Canonical, with flat names."""
    callers: Mapping[str, CallerTool]
    """By flat name."""
    notes: Sequence[str]
    """What was left out."""

    def flat_name(self, namespace: Any, name: Any) -> Any:
        """What the model knows the caller's tool as; `name` itself for one that is not declared. Some callers drop the
        namespace: then any tool of that name is meant."""
        named = {caller.namespace: flat for flat, caller in self.callers.items() if caller.name == name}
        if isinstance(namespace, str | None) and namespace in named:
            return named[namespace]
        return next(iter(named.values()), name) if namespace is None else name


def declared_tools(raw: JsonObject) -> DeclaredTools:
    """Reads `tools`, and the `additional_tools` items that a caller may put among its input. Raises InvalidRequest."""
    found = list(_declared(raw.get("tools"), "tools"))
    items = raw.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            found += _declared(item.get("tools"), f"input[{index}].tools")
    notes = [f"{where}: {tool['type']} is a hosted tool, which we do not have; left out"
             for _, tool, where in found if tool["type"] not in ("function", "custom")]  # fmt: skip
    found = [entry for entry in found if entry[1]["type"] in ("function", "custom")]
    uses = Counter(read_text(tool, "name", where) for _, tool, where in found)
    tools, callers = [], {}
    for namespace, tool, where in found:
        name = tool["name"]
        flat = f"{namespace}__{name}" if namespace is not None and uses[name] > 1 else name
        is_custom = tool["type"] == "custom"
        tools.append((custom_tool if is_custom else function_tool)(tool, where, flat))
        callers[flat] = CallerTool(namespace=namespace, name=name, is_custom=is_custom)
    return DeclaredTools(tools=tools, callers=callers, notes=notes)


def responses_tool_choice(choice: Any, declared: DeclaredTools) -> Choosing:
    """Raises InvalidRequest."""
    if plain := plain_choice(choice, declared.tools):
        return plain
    if choice.get("type") == "allowed_tools":
        chosen = objects(choice.get("tools"), "tool_choice.tools")
        names = [_chosen(tool, declared) for tool in chosen if tool.get("type") in ("function", "custom")]
        return allowed(choice.get("mode"), names, declared.tools)
    if choice.get("type") not in ("function", "custom"):
        raise InvalidRequest(
            f"tool_choice of type {choice.get('type')!r} is a hosted tool, which we do not have; name a function",
            param="tool_choice",
        )
    return forced(_chosen(choice, declared), declared.tools)


def _chosen(choice: JsonObject, declared: DeclaredTools) -> Any:
    return declared.flat_name(choice.get("namespace"), choice.get("name"))


def _declared(value: Any, where: str, namespace: str | None = None) -> Iterator[tuple[str | None, JsonObject, str]]:
    """(namespace, tool, where it stands) of each tool that is not a namespace."""
    for index, tool in enumerate(objects(value, where)):
        place = f"{where}[{index}]"
        if read_text(tool, "type", place) == "namespace" and namespace is None:
            yield from _declared(tool.get("tools"), f"{place}.tools", read_text(tool, "name", place))
        else:
            yield namespace, tool, place
