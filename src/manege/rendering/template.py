"""A Jinja chat template as Hugging Face runs it: messages and tools in, text out.

Templates come from model folders, so they run in a sandbox. Where a template does not read `tools` (SmolLM2's), tools,
tool calls and tool results are written into ordinary messages in the Hermes form instead of being dropped silently.

Some harnesses send several system messages, also in the middle. Where a template refuses or drops those behind the
first, the leading ones become one, and later ones are shown as user turns, joined with those next to them since such
templates often want roles to alternate.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from manege.errors import ModelError, ProtocolError
from manege.types import JsonObject

__all__ = ["ChatTemplate"]

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens`: `bos_token`, `eos_token` ... as in tokenizer_config.json. Raises ModelError."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self.knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    def text(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], *, answer: bool = True) -> str:
        """The conversation as text; `answer`: ends where the assistant's answer begins. Raises ProtocolError."""
        if self.knows_tools:
            shown, shown_tools = [_with_parsed_arguments(message) for message in messages], list(tools) or None
        else:
            shown, shown_tools = _tools_as_text(messages, tools), None
        plain = _with_one_system(shown)
        try:
            text = self._render(shown, shown_tools, answer)
            # A late system message that is nowhere in the text was dropped.
            late = [message["content"].strip() for message in shown[1:] if message["role"] == "system"]
            if all(content in text for content in late):
                return text
        except ProtocolError:
            if plain == shown:
                raise
        return self._render(plain, shown_tools, answer)

    def _render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None, answer: bool) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=answer, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ProtocolError(f"the model's chat template refuses these messages: {error}") from error


def _with_one_system(messages: Sequence[JsonObject]) -> list[JsonObject]:
    num_leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    shown = _joined(messages[:num_leading])
    if all(message["role"] != "system" for message in messages[num_leading:]):
        return [*shown, *messages[num_leading:]]
    for message in messages[num_leading:]:
        turn = {"role": "user", "content": message["content"]} if message["role"] == "system" else message
        is_same = shown and shown[-1]["role"] == turn["role"] == "user"
        shown[-1:] = _joined([shown[-1], turn]) if is_same else [*shown[-1:], turn]
    return shown


def _joined(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """One message with the text of all of them."""
    return [{**messages[0], "content": "\n\n".join(message["content"] for message in messages)}] if messages else []


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML; Hugging Face's, which templates are written for, does not.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _with_parsed_arguments(message: JsonObject) -> JsonObject:
    """Templates apply `tojson` to arguments, so they want an object and not its JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        try:
            function = {**function, "arguments": json.loads(function["arguments"])}
        except ValueError:
            pass
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _tools_as_text(messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[JsonObject]:
    shown: list[JsonObject] = []
    in_tool_turn = False
    for message in messages:
        is_tool = message["role"] == "tool"
        if is_tool:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if in_tool_turn:
                shown[-1] = {"role": "user", "content": f"{shown[-1]['content']}\n{text}"}
            else:
                shown.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = [_call_as_text(call["function"]) for call in message["tool_calls"]]
            shown.append({**message, "content": "\n".join(filter(None, [message["content"], *calls]))})
        else:
            shown.append(message)
        in_tool_turn = is_tool
    if tools:
        text = _TOOLS.format(tools="\n".join(_to_json(tool) for tool in tools))
        if shown and shown[0]["role"] == "system":
            shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{text}"}
        else:
            shown.insert(0, {"role": "system", "content": text})
    return shown


def _call_as_text(function: JsonObject) -> str:
    return f'<tool_call>\n{{"name": {_to_json(function["name"])}, "arguments": {function["arguments"]}}}\n</tool_call>'
