"""Grammars walked token by token: the model's own form is accepted, anything else is refused at the right token."""

import json
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from manege.errors import ProtocolError
from tests.renderers import from_template, generic, known

USER = {"role": "user", "content": "Hi"}


def tool(name, properties=None, required=(), **more):
    schema = {"type": "object", "properties": properties or {}, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


BASH = tool("bash", {"command": {"type": "string"}, "timeout": {"type": "integer"}}, ["command"])
BASH_OUT = tool("bash_output", {"id": {"type": "string", "enum": ["a", "b"]}}, ["id"], additionalProperties=False)
NO_SCHEMA = {"type": "function", "function": {"name": "now"}}
TOOLS = [BASH, BASH_OUT, NO_SCHEMA]


@cache
def guide_tokens(renderer):
    return LLTokenizer(renderer._tokenizer.to_str(), eos_token=[2])


def walk(renderer, grammar, text):
    """How much of the text is accepted, and whether the answer may end there."""
    matcher = LLMatcher(guide_tokens(renderer), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = renderer.encode(text)
    num_accepted = matcher.try_consume_tokens(ids)
    assert not matcher.is_error(), matcher.get_error()
    return renderer._tokenizer.decode(ids[:num_accepted], skip_special_tokens=False), matcher.is_accepting()


def rendered(renderer, *calls):
    """The turn with these calls as the template writes it, up to its end."""
    calls = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    before = renderer._text([USER], TOOLS, True)
    turn = renderer._text([USER, {"role": "assistant", "content": "", "tool_calls": calls}], TOOLS, False)
    turn = turn[len(before.removesuffix("<think>\n")) :]
    turn = turn.rpartition("</think>")[2].lstrip("\n")
    ends = [renderer._added[token] for token in renderer.stop_ids]
    return min((turn.partition(end)[0] for end in ends), key=len).rstrip()


def grammar_of(renderer, tools=TOOLS, max_calls=None):
    prompt = renderer.render([USER], tools)
    grammar = renderer.tool_grammar(prompt, tools, max_calls=max_calls)
    return grammar, "</think>\n\n" if renderer._opened(prompt) == "<think>" else ""


RENDERERS = {
    **{name: lambda name=name: generic(name) for name in ["hermes", "hermes as text", "xml", "llama", "thinking"]},
    **{
        name: lambda name=name: known(name)
        for name in [
            *["Qwen/Qwen3-0.6B", "Qwen/Qwen3.5-4B", "deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct"],
            *["meta-llama/Llama-3.2-1B-Instruct", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"],
        ]
    },
}
forms = pytest.mark.parametrize("name", RENDERERS)
ONE_CALL = ("llama", "moonshotai/Kimi-K2-Instruct", "meta-llama/Llama-3.2-1B-Instruct")
"""Forms in which a turn has one call, or whose calls are numbered."""


@forms
@pytest.mark.parametrize(
    "call",
    [
        ("bash", '{"command": "ls <b> \\"x\\" é"}'),
        ("bash", '{"command": "ls", "timeout": 5}'),
        ("bash_output", '{"id": "b"}'),
        ("now", "{}"),
    ],
)
def test_rendered_call_is_accepted_and_is_all(name, call):
    renderer = RENDERERS[name]()
    grammar, thought = grammar_of(renderer)
    text = thought + rendered(renderer, call)
    assert walk(renderer, grammar, text) == (text, True)
    # The parser of the same renderer reads the call, so that the whole path agrees on the form.
    reply = renderer.parse(renderer.encode(text), prompt_ids=renderer.render([USER], TOOLS), tools=TOOLS)
    assert [(c.name, json.loads(c.arguments)) for c in reply.tool_calls] == [(call[0], json.loads(call[1]))]
    assert reply.content == ""


@forms
@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (("other", "{}"), "other"),
        (("bash_output", '{"id": "zzz"}'), "zzz"),
        (("bash", '{"timeout": 5}'), "timeout"),
        (("bash", '{"command": "ls", "timeout": "soon"}'), "soon"),
        (("bash_output", '{"id": "a", "more": 1}'), "more"),
    ],
    ids=["unknown tool", "not in enum", "required is missing", "wrong type", "unknown argument"],
)
def test_wrong_call_is_refused_where_it_goes_wrong(name, call, wrong):
    renderer = RENDERERS[name]()
    grammar, thought = grammar_of(renderer)
    text = thought + rendered(renderer, call)
    accepted, is_end = walk(renderer, grammar, text)
    assert not is_end
    assert text.startswith(accepted)
    position = text.rindex(wrong)
    assert position - 14 <= len(accepted) <= position + len(wrong)


@forms
def test_text_and_nothing_are_no_call(name):
    renderer = RENDERERS[name]()
    grammar, thought = grammar_of(renderer)
    assert walk(renderer, grammar, thought) == (thought, False)
    assert walk(renderer, grammar, f"{thought}Hello there") == (thought, False)


@forms
@pytest.mark.parametrize(("max_calls", "allowed"), [(1, 1), (2, 2), (None, 3)])
def test_number_of_calls_is_bounded(name, max_calls, allowed):
    renderer = RENDERERS[name]()
    if name in ONE_CALL:
        allowed = 1
    grammar, thought = grammar_of(renderer, max_calls=max_calls)
    for number in (1, 2, 3):
        if number > 1 and name in ONE_CALL:
            break
        text = thought + rendered(renderer, *[("bash", '{"command": "ls"}'), ("now", "{}"), ("now", "{}")][:number])
        accepted, is_end = walk(renderer, grammar, text)
        assert (accepted == text and is_end) == (number <= allowed)


@pytest.mark.parametrize("name", ["hermes", "hermes as text", "xml", "Qwen/Qwen3.5-4B"])
def test_model_may_think_first(name):
    renderer = RENDERERS[name]()
    grammar, _ = grammar_of(renderer)
    prompt = renderer.render([USER], TOOLS)
    may_think = name != "hermes as text"
    closed = [*prompt, *renderer.encode("<think>\n\n</think>\n\n")]
    call = rendered(renderer, ("now", "{}"))
    opener = "" if renderer._opened(prompt) else "<think>"
    text = f"{opener}\nLet me see: {{}} <b>\n</think>\n\n{call}"
    accepted, is_end = walk(renderer, grammar, text)
    assert (accepted == text and is_end) == may_think
    no_thought = renderer.tool_grammar(closed, TOOLS, max_calls=None)
    assert walk(renderer, no_thought, call) == (call, True)
    assert walk(renderer, no_thought, text)[0] in ("", "<")


def test_thought_whose_tags_are_text_is_closed_before_the_call():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        '[{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}]{% endfor %}<|im_end|>'
        "{% endfor %}{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}{% if 0 %}{{ tools }}{% endif %}"
    )
    renderer = from_template(template)
    grammar, thought = grammar_of(renderer, [NO_SCHEMA])
    assert thought
    text = 'Hm. </think>\n\n[{"name": "now", "arguments": {}}]'
    assert walk(renderer, grammar, text) == (text, True)
    assert walk(renderer, grammar, text.replace("</think>", ""))[1] is False


@pytest.mark.parametrize("name", ["hermes", "thinking", "hermes as text", "Qwen/Qwen3-0.6B"])
def test_json_answer(name):
    renderer = RENDERERS[name]()
    prompt = renderer.render([USER], ())
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    thought = "Hm.\n</think>\n\n" if name == "thinking" else ""
    grammar = renderer.json_grammar(prompt, schema)
    for text in ('{"title": "An é"}', '{\n  "title":"x"\n}'):
        assert walk(renderer, grammar, thought + text) == (thought + text, True)
    assert walk(renderer, grammar, f'{thought}{{"name": 1}}')[1] is False
    anything = renderer.json_grammar(prompt, {})
    assert walk(renderer, anything, thought + '{"a": [1, {"b": null}]}')[1] is True
    assert walk(renderer, anything, thought + "[1]") == (thought, False)


def test_white_space_is_bounded():
    renderer = generic("hermes")
    grammar = renderer.json_grammar(renderer.render([USER], ()), {"type": "object"})
    accepted, _ = walk(renderer, grammar, "{" + "\n" * 40)
    assert len(accepted) < 20


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.org/a.json"}}}, "example.org"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, "look-around"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "text"),
        ({"type": "object", "properties": 5}, "schema"),
        ({"type": "object", "properties": {"a": {"enum": ["\ud800"]}}}, "schema"),
    ],
)
def test_schema_that_cannot_be_followed_is_the_callers_error(schema, reason):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(ProtocolError, match=reason):
        generic("hermes").json_grammar([], schema)
    for name in ("hermes", "xml"):
        with pytest.raises(ProtocolError, match=reason):
            generic(name).tool_grammar([], tools, max_calls=1)


@pytest.mark.parametrize("name", ["hermes", "xml"])
def test_odd_names_are_quoted(name):
    tools = [tool('a"b/🙂', {"ké": {"type": "string", "enum": ["🙂", '"']}}, ["ké"])]
    renderer = generic(name)
    grammar = renderer.tool_grammar([], tools, max_calls=1)
    name_text = 'a\\"b/🙂' if name == "hermes" else 'a"b/🙂'
    text = rendered(renderer, ("NAME", '{"ké": "🙂"}')).replace("NAME", name_text)
    assert walk(renderer, grammar, text) == (text, True)


def test_definitions_are_known_in_every_form():
    schema = {"properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}, "required": ["p"]}
    for name in ("hermes", "xml"):
        renderer = generic(name)
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        grammar = renderer.tool_grammar([], tools, max_calls=1)
        text = rendered(renderer, ("f", '{"p": 5}'))
        assert walk(renderer, grammar, text) == (text, True)


def test_form_that_cannot_be_read_has_no_grammar():
    renderer = from_template(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if false %}{{ tools }}{% endif %}"
    )
    assert renderer.tool_grammar([], TOOLS, max_calls=None) is None
    assert known("zai-org/GLM-5").tool_grammar([], TOOLS, max_calls=None) is None
