"""Answers parsed token by token: the same message for every way of cutting the tokens, and a known one."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manege.rendering.base import ParsedReply, ToolCall
from manege.rendering.text import Detokeniser, cut
from tests.renderers import generic, tokenizer_with

PARAMETERS = {"type": "object", "properties": {"c": {"type": "string"}, "n": {"type": "integer"}}}
BASH = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"c": "ls"}}\n</tool_call>'
FRAGMENTS = [
    *["<think>", "</think>", "<tool_call>", "</tool_call>", "<think", "</", "ink>", "<tool", "_call>", "<"],
    *[
        "\n",
        "\n\n",
        " ",
        "; ",
        "Hello",
        " wörld",
        "🙂",
        "日本",
        "é",
        "STOP",
        "ST",
        "OP",
        "<|im_end|>",
        "<|python_tag|>",
    ],
    *[CALL, '{"name": "bash", "parameters": {"c": "}\\""}}', '{"name": "ls"}', "{", "}", '"', "\\", '{"a": 1}'],
    "<tool_call>\n<function=bash>\n<parameter=c>\n5\n</parameter>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
    *["<function=bash>", "<parameter=c>\nls\n</parameter>", "</function>"],
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
stops = st.sampled_from([(), ("STOP",), ("</think>", "ls"), ("OP", "STOP!"), ("🙂",), ("\n\n",), ("<tool_call>",)])
names = pytest.mark.parametrize("name", ["hermes", "hermes as text", "xml", "llama", "thinking"])


def total(parts):
    return ParsedReply(
        content="".join(part.content for part in parts),
        reasoning="".join(part.reasoning or "" for part in parts) or None,
        tool_calls=[call for part in parts for call in part.tool_calls],
    )


def fed(parser, chunks):
    return total([*map(parser.feed, chunks), parser.finish()])


def chunked(ids, cuts):
    edges = [0, *sorted(cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


@names
@settings(max_examples=150, deadline=None)
@given(data=st.data(), text=texts, stop=stops, tools=st.sampled_from([(), (BASH,)]))
def test_every_way_of_cutting_the_tokens_gives_the_same_message(name, data, text, stop, tools):
    renderer = generic(name)
    ids = renderer.encode(text)
    # Odd ids too: parts of characters in any order.
    ids += data.draw(st.lists(st.integers(20, renderer.vocab_size - 1), max_size=4))
    prompt = renderer.render([{"role": "user", "content": "Hi"}], tools)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    parsers = [renderer.live_parser(prompt_ids=prompt, tools=tools, stop=stop) for _ in range(3)]
    whole, *others = [fed(p, c) for p, c in zip(parsers, ([ids], chunked(ids, cuts), [[i] for i in ids]), strict=True)]
    assert others == [whole, whole]
    assert len({parser.stopped_by for parser in parsers}) == 1
    if parsers[0].stopped_by is None:
        assert whole == renderer.parse(ids, prompt_ids=prompt, tools=tools)
    else:
        assert parsers[0].stopped_by in stop


@pytest.mark.parametrize("text", [f"<think>é</think>🙂{CALL}", "Hi </think>\n日\n\n", f"a\n{CALL}\n{CALL}b STOP"])
def test_all_splits_of_a_short_answer(text):
    renderer = generic("hermes")
    ids = renderer.encode(text)[:60]
    whole = fed(renderer.live_parser(tools=[BASH], stop=["STOP"]), [ids])
    for first in range(len(ids) + 1):
        for second in range(first, len(ids) + 1):
            assert fed(renderer.live_parser(tools=[BASH], stop=["STOP"]), chunked(ids, [first, second])) == whole


def naive(text, *, is_thinking):
    """What an answer in Hermes' form says, with the whole text at hand."""
    reasoning, begun = "", text.lstrip()
    if is_thinking or begun.startswith("<think>"):
        inside, _, text = (text if is_thinking else begun.removeprefix("<think>")).partition("</think>")
        reasoning, text = inside.strip("\n"), text.lstrip("\n")
    calls, pieces, position = [], [], 0
    for match in re.finditer(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        try:
            call = json.loads(match[1])
            call = call if isinstance(call.get("name"), str) and call["name"] else None
        except (ValueError, AttributeError):
            call = None
        if call is None:
            continue
        pieces.append(text[position : match.start()])
        position = match.end()
        calls.append((call["name"], call.get("arguments", call.get("parameters", {}))))
    content = "".join([*pieces, text[position:]])
    if calls:
        content = content.rstrip() if pieces[0].strip() else content.strip()
    return content, reasoning, calls


@pytest.mark.parametrize("name", ["hermes", "hermes as text", "thinking"])
@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_message_is_what_the_whole_text_says(name, text):
    renderer = generic(name)
    ids = renderer.encode(text)
    prompt = renderer.render([{"role": "user", "content": "Hi"}], [BASH])
    reply = fed(renderer.live_parser(prompt_ids=prompt, tools=[BASH]), [[token] for token in ids])
    shown = text.replace("<|im_end|>", "")
    content, reasoning, calls = naive(shown, is_thinking=name == "thinking")
    said = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
    assert (reply.content, reply.reasoning or "", said) == (content, reasoning, calls)


@pytest.mark.parametrize(
    ("name", "text", "content", "reasoning", "calls"),
    [
        ("hermes", f"Ok.\n{CALL}\n{CALL}", "Ok.", None, [("bash", '{"c": "ls"}')] * 2),
        (
            "hermes",
            '<tool_call>{"arguments": {"c" :1.0, "c":  "\\u00e9é"}, "name": "bash"}</tool_call>',
            "",
            None,
            [("bash", '{"c" :1.0, "c":  "\\u00e9é"}')],
        ),
        ("hermes", '<tool_call>{"name": "other"}</tool_call>', "", None, [("other", "{}")]),
        (
            "hermes",
            '<tool_call>{"name": "\\ud800"}</tool_call>',
            '<tool_call>{"name": "\\ud800"}</tool_call>',
            None,
            [],
        ),
        ("hermes", f"<tool_call>{'[' * 9000}</tool_call>", f"<tool_call>{'[' * 9000}</tool_call>", None, []),
        ("hermes", f"<think>{CALL}</think>Hi", "Hi", CALL, []),
        ("thinking", "A.\n</think>\n\nHi", "Hi", "A.", []),
        ("thinking", "A.\n</thin", "", "A.\n</thin", []),
        ("llama", '{"name": "bash", "parameters": {"c":"{\\"}"}}', "", None, [("bash", '{"c":"{\\"}"}')]),
        (
            "llama",
            '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"n": 1}}\n',
            "",
            None,
            [("a", "{}"), ("b", '{"n": 1}')],
        ),
        ("llama", '{"name": "a"} is JSON', '{"name": "a"} is JSON', None, []),
        ("llama", '{"name": "a", "parameters": {}', '{"name": "a", "parameters": {}', None, []),
        ("llama", '{"name": "a", "parameters": {}} Done; bye.', "Done; bye.", None, [("a", "{}")]),
        ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", None, []),
        ("llama", 'So {"name": "a", "parameters": {}}', 'So {"name": "a", "parameters": {}}', None, []),
        ("xml", FRAGMENTS[-4], "", None, [("bash", '{"c": "5", "n": 5}')]),
        (
            "xml",
            "Ok.<tool_call>\n<function=bash>\n<parameter=c>\n\n a\n\n</parameter>\n<parameter=x>\n[1.50]\n"
            "</parameter>\n<parameter=n>\nmany\n</parameter>\n</function>\n</tool_call>",
            "Ok.",
            None,
            [("bash", '{"c": "\\n a\\n", "x": [1.50], "n": "many"}')],
        ),
        ("xml", "<tool_call><function=bash></function></tool_call>", "", None, [("bash", "{}")]),
        ("xml", "<tool_call><function=bash>ls</function></tool_call>", None, None, []),
        ("xml", "<tool_call>\n<function=bash>\n<parameter=c>\nls", None, None, []),
    ],
)
def test_form_of_the_template_is_read(name, text, content, reasoning, calls):
    renderer = generic(name)
    prompt = renderer.render([{"role": "user", "content": "Hi"}], [BASH])
    reply = renderer.parse(renderer.encode(text + "<|im_end|>"), prompt_ids=prompt, tools=[BASH])
    assert (reply.content, reply.reasoning) == (text if content is None else content, reasoning)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == calls


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "null", '"null"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"type": "number"}, "1e3", "1e3"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "object"}, '{"a": [1]}', '{"a": [1]}'),
        ({}, "true", "true"),
        ({"type": 5, "enum": None, "anyOf": 3}, "true", "true"),
    ],
)
def test_parameters_are_typed_by_the_schema(schema, text, value):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"p": schema}}}}
    call = f"<tool_call>\n<function=f>\n<parameter=p>\n{text}\n</parameter>\n</function>\n</tool_call>"
    renderer = generic("xml")
    assert renderer.parse(renderer.encode(call), tools=[tool]).tool_calls == [
        ToolCall(name="f", arguments=f'{{"p": {value}}}')
    ]


@names
def test_ordinary_text_flows_token_by_token(name):
    renderer = generic(name)
    text = "The quick brown fox, as they say, jumps over 13 lazy dogs < and > cats; it's 10 % {slow}. " * 3
    parser = renderer.live_parser(tools=[BASH], stop=["Observation:"])
    seen, said = "", ""
    for token in renderer.encode(text):
        seen += renderer.decode([token])
        said += parser.feed([token]).content
        assert seen.startswith(said)
        assert len(seen) - len(said) <= 3
    assert said + parser.finish().content == text


def test_reasoning_flows_token_by_token():
    renderer = generic("thinking")
    parser = renderer.live_parser(prompt_ids=renderer.render([{"role": "user", "content": "Hi"}], ()))
    said = [parser.feed([token]).reasoning for token in renderer.encode("First I look at the files")]
    assert "".join(filter(None, said)) == "First I look at the files"
    assert all(said)


def test_calls_come_once_in_order_as_soon_as_they_are_closed():
    renderer = generic("hermes")
    parser = renderer.live_parser(tools=[BASH])
    first = parser.feed(renderer.encode(f"Ok. {CALL}"))
    second = parser.feed(renderer.encode(f"\n{CALL.replace('ls', 'pwd')} More"))
    assert [call.arguments for call in first.tool_calls] == ['{"c": "ls"}']
    assert [call.arguments for call in second.tool_calls] == ['{"c": "pwd"}']
    assert (first.content, second.content, parser.finish().tool_calls) == ("Ok.", " \n More", [])


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "stop"),
    [
        ("One Observation: two", "One ", None, "Observation:"),
        ("One Observation", "One Observation", None, None),
        ("<think>One</think> STOP", " ", "One", "STOP"),
        ("<think>One STOP</think>Two", "", "One ", "STOP"),
        ("One STOP Observation:", "One ", None, "STOP"),
    ],
)
def test_text_ends_before_the_first_stop_string(text, content, reasoning, stop):
    renderer = generic("hermes")
    parser = renderer.live_parser(stop=["Observation:", "STOP", ""])
    reply = fed(parser, [[token] for token in renderer.encode(text)])
    assert (reply.content, reply.reasoning, parser.stopped_by) == (content, reasoning, stop)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), stop=stops)
def test_live_text_is_the_decoded_text(data, stop):
    renderer = generic("hermes")
    ids = data.draw(st.lists(st.integers(0, renderer.vocab_size - 1), max_size=60))
    ids += renderer.encode(data.draw(texts))
    parser = renderer.live_text(stop=stop)
    said = fed(parser, [[token] for token in ids]).content
    text = tokenizer_with("<think>", "</think>", "<tool_call>", "</tool_call>").decode(ids, skip_special_tokens=True)
    assert renderer.decode(ids) == text
    assert said == cut(text, stop)[0] + (cut(text, stop)[2] if parser.stopped_by is None else "")


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_characters_are_never_split(text):
    renderer = generic("hermes")
    pieces = [renderer.live_text().feed([token]).content for token in renderer.encode(text)]
    assert "\ufffd" in text or "\ufffd" not in "".join(pieces)


class CountingTokenizer:
    """A real tokenizer that counts what it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, ids, **options):
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize("text", ["A word or two. ", "日本語🙂", "\n", "é"])
def test_work_per_token_does_not_grow_with_the_answer(text):
    tokenizer = tokenizer_with()
    ids = (tokenizer.encode(text, add_special_tokens=False).ids * 8000)[:8000]
    counting = CountingTokenizer(tokenizer)
    detokeniser = Detokeniser(counting, ())
    assert "".join(map(detokeniser.push, ids)) + detokeniser.end() == tokenizer.decode(ids, skip_special_tokens=False)
    assert counting.num_decoded < 40 * len(ids)


def test_broken_bytes_are_not_kept_back_for_ever():
    tokenizer = tokenizer_with()
    half = tokenizer.encode("é", add_special_tokens=False).ids[:1]
    half = half if tokenizer.decode(half) == "\ufffd" else tokenizer.encode("🙂", add_special_tokens=False).ids[:1]
    counting = CountingTokenizer(tokenizer)
    detokeniser = Detokeniser(counting, ())
    pieces = [detokeniser.push(token) for token in half * 4000]
    assert sum(map(len, pieces)) > 3900
    assert "".join(pieces) + detokeniser.end() == tokenizer.decode(half * 4000)
    assert counting.num_decoded < 40 * 4000
