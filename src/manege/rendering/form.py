"""How a model writes its tool calls, read off its chat template: an answer is rendered whose names and arguments are
marks, and the text around the marks is the form. With two calls:

    <tool_call>\\n{"name": "NAME", "arguments": ARGUMENTS}\\n</tool_call>\\n<tool_call>\\n{"name": "NAME", ...
    |------- before ------|    |--- middle ---|         |-------------- between --------------|

`after` follows the last arguments, up to where the turn may end. This covers every form that shows arguments as JSON;
Qwen's XML form, which does not, is recognised by its tags.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from manege.errors import ProtocolError
from manege.rendering.calls import PYTHON_TAG, BareCalls, CallScanner, TaggedCalls, read_json, read_xml
from manege.rendering.reply import THINK, THINK_END
from manege.types import JsonObject

__all__ = ["HERMES_TAGS", "CallForm", "RenderText", "read_form", "scanner_for", "tags_of"]

RenderText = Callable[[Sequence[JsonObject], Sequence[JsonObject], bool], str]
"""Messages, tools and whether an answer follows, to text. Raises ProtocolError."""

HERMES_TAGS = ("<tool_call>", "</tool_call>")
_QUESTION = "maNegeQuestion"
_NAMES = ("maNegeFirstName", "maNegeSecondName")
_KEY, _VALUES = "maNegeKey", ("maNegeFirstValue", "maNegeSecondValue")
_IDS = ("abcdefgh{number}", "functions.{name}:{number}")
"""Ids to give to calls: of a length that all templates take; and as Kimi's model writes them, in place of a name."""
_XML_CALL = "<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The text around the names and the arguments of calls."""

    before: str
    middle: str
    """Between name and arguments; empty in the XML form, whose arguments stand for the whole function body."""
    between: str | None
    """From the arguments of a call to the name of the next; None where a turn has one call at most."""
    after: str
    is_xml: bool


def read_form(render: RenderText, turn_ends: Sequence[str]) -> CallForm | None:
    """`turn_ends`: texts that end a turn. None where the form cannot be read."""
    return next(filter(None, (_form_with(render, turn_ends, id_of) for id_of in _IDS)), None)


def tags_of(form: CallForm | None) -> tuple[str, str] | None:
    """What opens and closes a call; None for bare JSON. Where the form is not known, Hermes' tags."""
    if form is None:
        return HERMES_TAGS
    if form.is_xml:
        opener, closer = form.before.removesuffix("<function="), form.after.removeprefix("</function>")
    else:
        opener, closer = form.before[: form.before.rfind("{")], form.after.partition("}")[2]
    opener, closer = opener.strip(), closer.strip()
    if not opener.removeprefix(PYTHON_TAG) and not closer and not form.is_xml:
        return None
    return (opener, closer) if opener and closer and "{" not in opener else HERMES_TAGS


def scanner_for(form: CallForm | None, tools: Sequence[JsonObject]) -> CallScanner:
    """What finds the calls of this form in an answer."""
    tags = tags_of(form)
    if tags is None:
        return BareCalls(partial(read_json, needs_arguments=True))
    return TaggedCalls(*tags, partial(read_xml, tools=tools) if form and form.is_xml else read_json)


def _form_with(render: RenderText, turn_ends: Sequence[str], id_of: str) -> CallForm | None:
    single = _turn(render, turn_ends, id_of, 1)
    if single is None:
        return None
    is_xml = _XML_CALL.format(name=_NAMES[0], key=_KEY, value=_VALUES[0]) in single
    parts = _parts(single, is_xml)
    if parts is None:
        return None
    several = _turn(render, turn_ends, id_of, 2)
    ahead = _parts(several, is_xml) if several else None
    rest = _parts(ahead[2], is_xml, 1) if ahead else None
    # A form that counts its calls is known for one call only.
    is_regular = ahead and rest and (ahead[:2], rest[1:]) == (parts[:2], parts[1:])
    return CallForm(
        before=parts[0],
        middle=parts[1],
        between=rest[0] if rest and is_regular else None,
        after=parts[2].rstrip(),
        is_xml=is_xml,
    )


def _turn(render: RenderText, turn_ends: Sequence[str], id_of: str, num_calls: int) -> str | None:
    """What the assistant says in a turn of calls, without its header, an empty thought and the end of the turn."""
    names = _NAMES[:num_calls]
    tools = [_tool(name) for name in names]
    calls = [_call(id_of, number, name, _VALUES[number]) for number, name in enumerate(names)]
    user = {"role": "user", "content": _QUESTION}
    try:
        before = render([user], tools, True)
        after = render([user, {"role": "assistant", "content": "", "tool_calls": calls}], tools, False)
    except ProtocolError:
        return None
    # Templates may open a thought for the answer that they do not show later.
    header = before[: before.rfind(THINK)] if before.rfind(THINK) > before.rfind(_QUESTION) else before
    if not after.startswith(header):
        return None
    turn = after[len(header) :]
    if any(turn.count(name) != 1 for name in names):
        return None
    thought, closed, said = turn.partition(THINK_END)
    turn = said.lstrip("\n") if closed and names[0] not in thought else turn
    ends = [position for end in turn_ends if (position := turn.find(end, turn.rfind(_VALUES[num_calls - 1]))) >= 0]
    return turn[: min(ends)] if ends else turn


def _parts(turn: str, is_xml: bool, number: int = 0) -> tuple[str, str, str] | None:
    """Before the name, between name and arguments, after the arguments of one call."""
    before, found, rest = turn.partition(_NAMES[number])
    if is_xml:
        body = _XML_CALL.partition("{name}")[2].removesuffix("</function>")
        arguments = body.format(key=_KEY, value=_VALUES[number])
        return (before, "", rest.removeprefix(arguments)) if rest.startswith(arguments) else None
    start, end = rest.rfind("{", 0, rest.find(_KEY)), rest.find("}", rest.find(_VALUES[number])) + 1
    try:
        is_shown = found and json.loads(rest[start:end]) == {_KEY: _VALUES[number]}
    except ValueError:
        return None
    return (before, rest[:start], rest[end:]) if is_shown else None


def _tool(name: str) -> JsonObject:
    parameters = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "Test.", "parameters": parameters}}


def _call(id_of: str, number: int, name: str, value: str) -> JsonObject:
    function = {"name": name, "arguments": json.dumps({_KEY: value})}
    return {"id": id_of.format(name=name, number=number), "type": "function", "function": function}
