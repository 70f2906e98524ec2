"""Grammars of answers that must call a tool or be JSON, in llguidance's dialect of Lark
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).

    start: calls
    calls: before call (between call)* after
    call: call_0 | call_1
    call_0: "bash" "\\", \\"arguments\\": " %json {...}

The text around names and arguments is the model's own (`form.CallForm`); tokens that llguidance treats as special are
written by their id. A grammar ends where the turn may end. It is compiled once here, so that a schema that cannot be
followed is the caller's error, with llguidance's reason.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from manege.errors import ProtocolError
from manege.rendering.calls import schema_types
from manege.rendering.form import CallForm
from manege.rendering.reply import THINK, THINK_END
from manege.types import JsonObject

__all__ = ["GrammarWriter"]

# Without a bound, a weak model writes white space until its tokens are used up.
_JSON_STYLE = {"whitespace_pattern": r"[ \n\t]{0,12}"}
_ANY_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class GrammarWriter:
    """Writes the grammars of one tokenizer."""

    tokens: Mapping[str, int]
    """Text and id of those that llguidance treats as special."""

    def tool_calls(
        self, form: CallForm, tools: Sequence[JsonObject], *, max_calls: int | None, opened: str | None
    ) -> str:
        """An answer of one or more calls of `tools`. `opened`: THINK if the prompt opens a thought, THINK_END if it
        closes one, None otherwise. Raises ProtocolError for a schema that cannot be followed."""
        thought, rules = self._thought(opened)
        return _compiled([f"start: {thought} calls", *rules, *self._calls(form, tools, max_calls)])

    def json(
        self,
        schema: JsonObject,
        *,
        form: CallForm | None,
        tools: Sequence[JsonObject],
        max_calls: int | None,
        opened: str | None,
    ) -> str:
        """An answer that is JSON of this schema, or calls of `tools`. Raises ProtocolError as above."""
        thought, rules = self._thought(opened)
        rules.append(f"object: {_json(schema or {'type': 'object'})}")
        if form is None or not tools:
            return _compiled([f"start: {thought} object", *rules])
        return _compiled([f"start: {thought} (object | calls)", *rules, *self._calls(form, tools, max_calls)])

    def _calls(self, form: CallForm, tools: Sequence[JsonObject], max_calls: int | None) -> list[str]:
        """The rules of `calls`."""
        more, rules = "", []
        if form.between is not None and max_calls != 1:
            times = "*" if max_calls is None else f"{{0,{max_calls - 1}}}"
            more = f"({self._literal(form.between)} call){times}"
        for number, tool in enumerate(tools):
            function = tool["function"]
            schema = {"type": "object", **(function.get("parameters") or {})}
            # JSON forms show the name within a string.
            name = function["name"] if form.is_xml else json.dumps(function["name"], ensure_ascii=False)[1:-1]
            if form.is_xml:
                rules += [f"call_{number}: {_quoted(name)} {_quoted('>' + chr(10))} args_{number}"]
                rules += _xml_arguments(f"args_{number}", schema)
            else:
                rules += [f"call_{number}: {_quoted(name)} {self._literal(form.middle)} {_json(schema)}"]
        parts = [self._literal(form.before), "call", more, self._literal(form.after)]
        names = " | ".join(f"call_{number}" for number in range(len(tools)))
        return [f"calls: {' '.join(filter(None, parts))}", f"call: {names}", *rules]

    def _thought(self, opened: str | None) -> tuple[str, list[str]]:
        """What may stand before the answer, and its rules."""
        if opened == THINK_END or (opened is None and THINK not in self.tokens):
            return "", []
        if THINK_END in self.tokens:
            rules = [f"thought: {_ANY_TEXT} {self._literal(THINK_END)} /\\n{{0,2}}/"]
        else:
            rules = [f"thought: inside /\\n{{0,2}}/\ninside[suffix={_quoted(THINK_END)}]: {_ANY_TEXT}"]
        return ("thought", rules) if opened == THINK else (f"({self._literal(THINK)} thought)?", rules)

    def _literal(self, text: str) -> str:
        """Exactly this text; special tokens cannot be written as text."""
        pattern = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        pieces = re.split(f"({pattern})", text) if pattern else [text]
        return " ".join(
            f"<[{self.tokens[piece]}]>" if piece in self.tokens else _quoted(piece) for piece in pieces if piece
        )


def _xml_arguments(name: str, schema: JsonObject) -> list[str]:
    """Rules of the parameters of a function, in the order of its schema."""
    _compiled([f"start: {_json(schema)}"])
    properties: dict[str, Any] = dict(schema.get("properties") or {})
    if not properties:
        return [
            f'{name}: ("<parameter=" /[^<>\\n]+/ ">\\n" {name}_text)* ',
            f"{name}_text[suffix={_quoted(chr(10) + '</parameter>' + chr(10))}]: {_ANY_TEXT}",
        ]
    required = schema.get("required") or []
    properties |= {key: {} for key in required if key not in properties}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules = [
        f"{name}: {' '.join(f'{name}_{i}' + ('' if key in required else '?') for i, key in enumerate(properties))}"
    ]
    for i, (key, value) in enumerate(properties.items()):
        end = _quoted("\n</parameter>\n")
        types = schema_types(value)
        texts = value.get("enum") if isinstance(value, dict) else None
        head = f"{name}_{i}: {_quoted(f'<parameter={key}>' + chr(10))}"
        if types == {"string"} and texts:
            rules.append(f"{head} ({' | '.join(map(_quoted, texts))}) {end}")
        elif types and "string" not in types:
            rules.append(f"{head} {_json({**shared, **value})} {end}")
        else:
            rules.append(f"{head} {name}_{i}_text\n{name}_{i}_text[suffix={end}]: {_ANY_TEXT}")
    return rules


def _json(schema: JsonObject) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _compiled(rules: Sequence[str]) -> str:
    grammar = "\n".join(rules)
    error = LLMatcher.validate_grammar(
        LLMatcher.grammar_from_lark(grammar), limits=LLParserLimits(verbose_errors=False)
    )
    if error:
        raise ProtocolError(f"the answer cannot be held to this schema: {error.strip()}; simplify the schema")
    return grammar
