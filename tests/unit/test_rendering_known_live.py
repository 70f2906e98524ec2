"""Models of the library `renderers`: what is streamed is what its parsers say of the whole answer."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.parsing import parse_gpt_oss

from manege.rendering.base import ParsedReply
from manege.rendering.known_live import KnownLive
from tests.renderers import KNOWN, known, tokenizer_with
from tests.unit.test_rendering_live import BASH, chunked, fed

WORDS = [
    *[
        "Hello",
        " wörld 🙂",
        "日本",
        "\n",
        "\n\n",
        " ",
        "{",
        "}",
        "<think>",
        "</think>",
        "<",
        "</th",
        "ink>",
        "bash",
        "STOP",
    ],
    *['{"name": "bash", "arguments": {"c": "ls"}}', '{"name": "bash", "parameters": {"c": "ls"}}', '{"c": "ls"}'],
    "<function=bash>\n<parameter=c>\nls\n</parameter>\n</function>",
    '<invoke name="bash"><parameter name="c">ls</parameter></invoke>',
    *["functions.bash:0", "function", "\n```json\n", "\n```", "<|im_end|>"],
]
families = pytest.mark.parametrize("name", KNOWN)


def fragments(name):
    # The library forgets the text before such a header, which models do not write.
    return [*WORDS, *(token for token in KNOWN[name] if token != "<|end_header_id|>")]


def prompt_of(renderer, tools):
    return renderer.render([{"role": "user", "content": "Hi"}], tools)


@families
@settings(max_examples=100, deadline=None)
@given(data=st.data(), tools=st.sampled_from([(), (BASH,)]), has_prompt=st.booleans())
def test_stream_says_what_the_library_says(name, data, tools, has_prompt):
    renderer = known(name)
    ids = renderer.encode("".join(data.draw(st.lists(st.sampled_from(fragments(name)), max_size=10))))
    ids += data.draw(st.lists(st.integers(20, 49000), max_size=3))
    prompt = prompt_of(renderer, tools) if has_prompt else []
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=5))
    reply = fed(renderer.live_parser(prompt_ids=prompt, tools=tools), [[token] for token in ids])
    assert reply == fed(renderer.live_parser(prompt_ids=prompt, tools=tools), chunked(ids, cuts))
    assert reply == renderer.parse(ids, prompt_ids=prompt, tools=tools)
    said = renderer._renderer.parse_response(list(ids), tools=list(tools) or None, prompt_ids=list(prompt))
    assert (reply.reasoning or "") == (said.reasoning_content or "").strip()
    calls = [call for call in said.tool_calls if call.status in ("ok", "unknown_tool") and call.name and tools]
    assert [call.name for call in reply.tool_calls] == [call.name for call in calls]
    if len(calls) == len(said.tool_calls):
        assert reply.content == said.content.strip()
    else:
        assert reply.content.startswith(said.content.strip())
        assert len(reply.content) > len(said.content.strip())


@families
@settings(max_examples=40, deadline=None)
@given(data=st.data(), stop=st.sampled_from(["STOP", "</think>", "🙂", "\n\n", "wö"]))
def test_stop_strings_never_reach_the_message(name, data, stop):
    renderer = known(name)
    ids = renderer.encode("".join(data.draw(st.lists(st.sampled_from(fragments(name)), max_size=10))))
    parsers = [renderer.live_parser(tools=[BASH], stop=[stop]) for _ in range(2)]
    reply = fed(parsers[0], [[token] for token in ids])
    assert reply == fed(parsers[1], [ids])
    assert (parsers[0].stopped_by is not None) == (stop in renderer.decode(ids))
    if parsers[0].stopped_by:
        # Tags are hidden where stop strings are searched, and space around parts is dropped.
        assert stop in ("</think>", "\n\n") or stop not in f"{reply.reasoning} {reply.content}"
    else:
        assert reply == renderer.parse(ids, tools=[BASH])


@families
def test_reasoning_and_content_flow_token_by_token(name):
    renderer = known(name)
    prompt = prompt_of(renderer, ())
    if name == "meta-llama/Llama-3.2-1B-Instruct":
        thought, answer = "", "Here is what I found, in short."
    else:
        thought, answer = "First I look at the files.", "Here is what I found, in short."
    opened = renderer._opened(prompt) == "<think>"
    text = f"{'' if opened or not thought else '<think>'}{thought}{'</think>' if thought else ''}{answer}"
    parser = renderer.live_parser(prompt_ids=prompt)
    parts = [parser.feed([token]) for token in renderer.encode(text)]
    assert sum(bool(part.reasoning) for part in parts) >= len(thought.split()) - 1
    assert sum(bool(part.content) for part in parts) >= len(answer.split()) - 1
    last = parser.finish()
    said = "".join(part.reasoning or "" for part in [*parts, last]), "".join(part.content for part in [*parts, last])
    assert said == (thought, answer)


@families
def test_rendered_call_is_parsed(name):
    renderer = known(name)
    function = {"name": "bash", "arguments": json.dumps({"c": "ls -l"})}
    call = {"id": "functions.bash:0", "type": "function", "function": function}
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = renderer.render([user], [BASH])
    ids = renderer._render([user, answer], [BASH], answer=False)
    # What the prompt opens is not always shown later.
    start = next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt))
    reply = fed(renderer.live_parser(prompt_ids=prompt, tools=[BASH]), [[token] for token in ids[start:]])
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [("bash", {"c": "ls -l"})]
    assert reply.content == ""


HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_harmony_streams_what_the_library_says(data):
    """The renderer of gpt-oss needs a vocabulary from the network; its parser does not."""
    tokenizer = tokenizer_with(*HARMONY)
    ids_of = {token.strip("<|>") + "_id": tokenizer.token_to_id(token) for token in HARMONY}

    def parse(ids, is_all):
        parsed = parse_gpt_oss(_View(tokenizer), [*prefix, *ids], **ids_of)
        reasoning = (parsed.reasoning_content or "").strip() or None
        return ParsedReply(content=parsed.content.strip(), reasoning=reasoning, tool_calls=[])

    prefix = tokenizer.encode("<|start|>assistant<|channel|>analysis<|message|>").ids
    texts = ["Hello ", "wörld", "\n", "analysis", "final", "commentary", " to=functions.bash", *HARMONY]
    texts += ["<|end|><|start|>assistant<|channel|>final<|message|>", "<|end|><|start|>assistant<|channel|>commentary"]
    ids = tokenizer.encode("".join(data.draw(st.lists(st.sampled_from(texts), max_size=12)))).ids
    added = set(ids_of.values())
    parser = KnownLive(
        tokenizer, parse, added=added, special=added, tags=(), is_json_call=False, max_questions=16, stop=()
    )
    assert fed(parser, [[token] for token in ids]) == parse(ids, True)


class _View:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def decode(self, ids, skip_special_tokens):
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
