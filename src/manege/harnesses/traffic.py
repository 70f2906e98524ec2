"""What a model call of a harness is: the thread that it belongs to, and the request without noise. Pure.

The rules are data of the harness (`harness.Harness`). A program that is not known has one thread, `main`, and its
requests stay as they are: a call without tools may be the whole of an agent, so nothing is guessed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from manege.harnesses.harness import Filter, Harness, ThreadRule, load, names
from manege.programs import import_function
from manege.protocols.base import ModelRequest
from manege.types import JsonObject

__all__ = ["Traffic", "read_traffic", "recognise"]

_MAIN = "main"
_HEADER = re.compile(r"\{([a-z0-9-]+)\}")
_SHOWN_CHARS = 200
"""Of what a filter took out, in the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One call, read."""

    request: ModelRequest
    """What the engine gets to see."""
    thread: str
    """`main`, `agent:<id>` (a sub-agent) or `side:<kind>` (a title, a summary ...)."""
    edits: tuple[str, ...]
    """What filters changed, one line each."""


def read_traffic(
    harness: Harness | None, headers: Mapping[str, str], request: ModelRequest, *, with_optional: bool = False
) -> Traffic:
    """`headers`: names in lower case. `with_optional`: also take out what only differs between rollouts."""
    if harness is None:
        return Traffic(request=request, thread=_MAIN, edits=())
    edits: list[str] = []
    filters = [item for item in harness.filters if with_optional or not item.optional]
    if filters:
        messages = [_filtered(message, filters, edits) for message in request.messages]
        request = replace(request, messages=messages) if edits else request
    if harness.function is not None:
        edit = import_function(f"manege.harnesses.{harness.function}", what=f"filter of {harness.name}")
        request, lines = edit(request)
        edits += lines
    return Traffic(request=request, thread=_thread(harness, headers, request), edits=tuple(edits))


def recognise(headers: Mapping[str, str]) -> Harness | None:
    """The harness that sends such headers (names in lower case); None: none that is known."""
    return _recognise(tuple((name, headers.get(name, "")) for name in _telling_headers()))


@cache
def _telling_headers() -> tuple[str, ...]:
    return tuple(sorted({name for harness in map(load, names()) for name in harness.headers}))


@lru_cache(256)
def _recognise(values: tuple[tuple[str, str], ...]) -> Harness | None:
    """Remembered, since every call of a harness has the same values."""
    known = (harness for harness in map(load, names()) if harness.headers)
    return next((harness for harness in known if _all_match(harness.headers, dict(values))), None)


def _thread(harness: Harness, headers: Mapping[str, str], request: ModelRequest) -> str:
    for rule in harness.threads:
        if _holds(rule, headers, request):
            return _HEADER.sub(lambda match: headers.get(match[1], ""), rule.thread)
    return _MAIN


def _holds(rule: ThreadRule, headers: Mapping[str, str], request: ModelRequest) -> bool:
    return (
        _all_match(rule.headers, headers)
        and rule.tools in (None, bool(request.tools))
        and rule.structured in (None, request.json_schema is not None)
        and (rule.system is None or re.search(rule.system, _instructions(request)) is not None)
        and (rule.user is None or re.search(rule.user, _last_of_user(request)) is not None)
    )


def _all_match(patterns: Mapping[str, str], headers: Mapping[str, str]) -> bool:
    return all(re.search(pattern, headers.get(name, "")) for name, pattern in patterns.items())


def _instructions(request: ModelRequest) -> str:
    return "\n".join(_text(message) for message in request.messages if message["role"] == "system")


def _last_of_user(request: ModelRequest) -> str:
    return next((_text(message) for message in reversed(request.messages) if message["role"] == "user"), "")


def _text(message: JsonObject) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content or ())


def _filtered(message: JsonObject, filters: Sequence[Filter], edits: list[str]) -> JsonObject:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    for item in filters:
        if message["role"] not in (("system", "user") if item.in_user else ("system",)):
            continue
        found = [match[0] for match in re.finditer(item.pattern, content)]
        edits += [f"{item.name}: {text[:_SHOWN_CHARS]!r}" for text in found]
        content = re.sub(item.pattern, item.replacement, content) if found else content
    return {**message, "content": content}
