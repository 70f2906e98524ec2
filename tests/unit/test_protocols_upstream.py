"""A canonical request as an upstream's chat completions body, and the upstream's answer back, however it is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manege.errors import EngineError
from manege.protocols.base import TokenLogprob
from manege.protocols.chat import ChatCompletions
from manege.protocols.chat_upstream import UpstreamReply, chat_body, read_chat_message
from manege.types import FinishReason
from tests.protocol_cases import cuts, json_values, messages, tool_call

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "shell", "parameters": {}, "strict": True}}


def chunk(**delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


@st.composite
def chunks(draw, message):
    """All that an upstream may make of a message: fragments, some of them put together, and chunks that say nothing."""
    name = draw(st.sampled_from(["reasoning", "reasoning_content"]))
    parts = [{name: piece} for piece in draw(cuts(message.get("reasoning_content", "")))]
    parts += [{"content": piece} for piece in draw(cuts(message["content"]))]
    numbered, named = draw(st.sampled_from([(True, True), (True, False), (False, True), (False, False)]))
    for index, call in enumerate(message.get("tool_calls", ())):
        place = {"index": index} if numbered else {}
        first, *rest = draw(cuts(call["function"]["arguments"])) or [""]
        if draw(st.booleans()):
            first, rest = "", [first, *rest]
        opening = {**place, "type": "function", "function": {**call["function"], "arguments": first}}
        parts.append({"tool_calls": [opening | ({"id": call["id"]} if named else {})]})
        parts += [{"tool_calls": [{**place, "function": {"arguments": piece}}]} for piece in rest]
    found = []
    while parts:
        part = parts.pop(0)
        while parts and draw(st.booleans()):
            for key, value in parts.pop(0).items():
                part = part | {key: part[key] + value if key in part else value}
        found.append(chunk(**part))
        if draw(st.booleans()):
            found.append(draw(st.sampled_from([{"choices": []}, {}, chunk(), chunk(content=None, tool_calls=None)])))
    ids = [call["id"] if named else f"call_z{index}" for index, call in enumerate(message.get("tool_calls", ()))]
    return found, ids


@settings(deadline=None)
@given(messages(), st.data())
def test_every_way_of_cutting_an_answer_gives_the_same_message(message, data):
    found, ids = data.draw(chunks(message))
    reply = UpstreamReply(call_id="z")
    read = [reply.read(part) for part in [{"choices": []}, *found]] + [reply.finish()]
    if "tool_calls" in message:
        message["tool_calls"] = [call | {"id": id} for call, id in zip(message["tool_calls"], ids, strict=True)]
    assert reply.message == message
    assert "".join(delta.content for delta in read) == message["content"]
    assert "".join(delta.reasoning for delta in read) == message.get("reasoning_content", "")
    assert [call for delta in read for call in delta.tool_calls] == message.get("tool_calls", [])


def test_a_whole_message_is_read_in_its_favour():
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    message = {"content": [{"type": "text", "text": "b"}], "reasoning": "c", "tool_calls": [call, call]}
    assert read_chat_message(message, call_id="z") == {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "c",
        "tool_calls": [tool_call("call_z0", "f", '{"a":1}'), tool_call("call_z1", "f", '{"a":1}')],
    }
    assert read_chat_message({"content": None}, call_id="z") == {"role": "assistant", "content": ""}


def test_calls_that_all_have_the_number_0_are_told_apart_by_their_ids():
    reply = UpstreamReply(call_id="z")
    for id in ("c1", "c2"):
        reply.read(chunk(tool_calls=[{"index": 0, "id": id, "function": {"name": "f", "arguments": ""}}]))
        reply.read(chunk(tool_calls=[{"index": 0, "id": id, "function": {"name": "f", "arguments": "{"}}]))
        reply.read(chunk(tool_calls=[{"index": 0, "id": None, "function": {"arguments": "}"}}]))
    assert reply.message["tool_calls"] == [tool_call("c1", "f", "{}"), tool_call("c2", "f", "{}")]


def test_the_same_id_twice_is_not_kept():
    call = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    message = {"tool_calls": [call | {"index": 0}, call | {"index": 1}]}
    assert [call["id"] for call in read_chat_message(message, call_id="z")["tool_calls"]] == ["c1", "call_z1"]


def test_ids_logprobs_usage_and_the_end_are_kept():
    reply = UpstreamReply(call_id="z")
    reply.read({**chunk(role="assistant"), "prompt_token_ids": [1, 2]})
    read = []
    for size in (1, 3, 2):
        tokens = [{"token": "t", "logprob": -size}] * size
        choice = {"delta": {"content": "t" * size}, "token_ids": [size] * size, "logprobs": {"content": tokens}}
        read.append(reply.read({"choices": [choice]}))
    reply.read({"choices": [{"delta": {}, "finish_reason": "length", "stop_reason": None, "logprobs": None}]})
    reply.read({"choices": [], "usage": {"prompt_tokens": 2}})
    assert [list(delta.response_ids) for delta in read] == [[1], [3, 3, 3], [2, 2]]
    assert [list(delta.logprobs) for delta in read] == [[TokenLogprob(text="t", logprob=-n)] * n for n in (1, 3, 2)]
    assert (reply.prompt_ids, reply.usage) == ([1, 2], {"prompt_tokens": 2})
    assert (reply.finish_reason, reply.stop_sequence) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("stop", "stop"), ("tool_calls", "stop"), ("eos", "stop"), ("length", "length"), ("abort", "abort")],
)
def test_the_end_has_our_words(reason, expected):
    reply = UpstreamReply(call_id="z")
    reply.read({"choices": [{"message": {"content": "a"}, "finish_reason": reason, "stop_reason": "END"}]})
    assert (reply.finish_reason, reply.stop_sequence) == (expected, "END")


@pytest.mark.parametrize("sent", [[], None, "<html>", {"error": {"message": "out of memory"}}])
def test_what_is_no_answer_is_an_engine_error(sent):
    with pytest.raises(EngineError):
        UpstreamReply(call_id="z").read(sent)


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {"choices": st.lists(st.fixed_dictionaries({"delta": st.dictionaries(
            st.sampled_from(["content", "reasoning", "tool_calls"]), json_values)}) | json_values, max_size=2)},
        optional={"usage": json_values, "prompt_token_ids": json_values},
    ) | json_values
)  # fmt: skip
def test_anything_is_read_or_an_engine_error(sent):
    reply = UpstreamReply(call_id="z")
    try:
        reply.read(sent)
    except EngineError:
        return
    assert reply.message["role"] == "assistant"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "shell"}}},
        {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        {"temperature": 0.5, "top_p": 0.5, "top_k": 4, "seed": 1, "stop": ["x"], "max_tokens": 3, "min_p": 0.5},
    ],
)
def test_a_request_says_upstream_what_it_said_here(asked):
    history = [
        {"role": "system", "content": "Be."},
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [tool_call("c", "shell", "{}")]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ]
    request = ChatCompletions().parse({"model": "a", "messages": history, **asked})
    body = chat_body(request, model="b")
    assert body["model"] == "b"
    assert None not in body.values()
    again = ChatCompletions().parse(body)
    for field in ("messages", "tools", "tool_choice", "forced_tool", "max_tool_calls", "json_schema", "sampling"):
        assert getattr(again, field) == getattr(request, field)
