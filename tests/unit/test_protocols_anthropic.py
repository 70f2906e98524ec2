"""The Anthropic Messages API: bodies to canonical requests, answers to bodies and to strict streams."""

import json

import anthropic
import httpx2
import orjson
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo
from hypothesis import given, settings
from hypothesis import strategies as st

from manege.errors import (
    ConflictError,
    ContextOverflowError,
    EngineError,
    ForbiddenError,
    NotFoundError,
    UnavailableError,
)
from manege.protocols.anthropic import AnthropicMessages
from manege.protocols.base import InvalidRequest, ModelRequest, ReplyDelta, ServedModel
from manege.types import FinishReason
from tests.random_answers import any_json, cuts, json_objects, meaning, messages, reply_of
from tests.stream_rules_messages import check_messages_stream, sse_events

PROTOCOL = AnthropicMessages()
USER = {"role": "user", "content": "Hi"}
REQUEST = PROTOCOL.parse({"model": "m", "max_tokens": 9, "messages": [USER]})
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def parse(**body):
    return PROTOCOL.parse(json.loads(json.dumps({"model": "m", "max_tokens": 9, "messages": [USER], **body})))


def turns(*blocks, role="user", before=()):
    after = [USER] if role == "assistant" else []
    return parse(messages=[*before, {"role": role, "content": list(blocks)}, *after]).messages


def call(arguments, call_id="call_ab", name="bash"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def stream(reply, deltas=()):
    written = PROTOCOL.stream(REQUEST, reply.head)
    return b"".join([written.start(), *[written.delta(0, delta) for delta in deltas], written.finish(reply)])


def test_a_turn_of_claude_code_becomes_canonical():
    cached = {"cache_control": {"type": "ephemeral"}}
    request = parse(
        system=[{"type": "text", "text": "You"}, {"type": "text", "text": "are", **cached}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]},
            {"role": "system", "content": [{"type": "text", "text": "reminder"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Look:", "citations": None},
                    {"type": "tool_use", "id": "toolu_0a", "name": "bash", "input": {"c": "ls  ü"}, **cached},
                    {"type": "tool_use", "id": "other", "name": "edit", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_0a", "content": [{"type": "text", "text": "x"}]},
                    {"type": "tool_result", "tool_use_id": "other", "content": "no", "is_error": True},
                    {"type": "text", "text": "go on", **cached},
                ],
            },
        ],
    )
    assert request.messages == [
        {"role": "system", "content": "You\nare"},
        {"role": "user", "content": "a\nb"},
        {"role": "system", "content": "reminder"},
        {
            "role": "assistant",
            "content": "Look:",
            "reasoning_content": "Hm.",
            "tool_calls": [call('{"c":"ls  ü"}', "call_0a"), call("{}", "other", "edit")],
        },
        {"role": "tool", "tool_call_id": "call_0a", "content": "x"},
        {"role": "tool", "tool_call_id": "other", "content": "no"},
        {"role": "user", "content": "go on"},
    ]
    assert len(request.notes) == 1
    assert "redacted thinking" in request.notes[0]


@pytest.mark.parametrize(
    ("wire", "canonical"),
    [("toolu_1f", "call_1f"), ("toolu1f", "toolu1f"), ("call_1f", "call_1f"), ("toolu_1_f", "toolu_1_f"),
     ("toolu_1\n", "toolu_1\n"), ("toolu_", "toolu_"), ("x-1", "x-1")],
)  # fmt: skip
def test_only_ids_of_our_making_are_rewritten(wire, canonical):
    assert turns({"type": "tool_result", "tool_use_id": wire, "content": "x"})[0]["tool_call_id"] == canonical


def test_images_stay_parts_and_everything_else_is_text():
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "see"}, PNG]}
    url = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    shown, asked = turns(result, {"type": "text", "text": "and"}, url)
    assert shown["content"] == [{"type": "text", "text": "see"}, PNG_PART]
    assert asked["content"] == [
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
    ]
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    inner = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "E"}]}}
    found = {"type": "search_result", "title": "R", "source": "s", "content": [{"type": "text", "text": "F"}]}
    assert turns(document, inner, found) == [{"role": "user", "content": "T\nD\nE\nR\ns\nF"}]
    reference = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "tool_reference", "tool_name": "bash"}],
    }
    assert turns(reference)[0]["content"] == "bash"


def test_a_result_keeps_its_place_and_an_error_without_text_says_so():
    before, result = turns(
        {"type": "text", "text": "first"}, {"type": "tool_result", "tool_use_id": "t", "is_error": True}
    )
    assert (before["content"], result["content"]) == ("first", "error")
    assert turns({"type": "tool_result", "tool_use_id": "t"}) == [{"role": "tool", "tool_call_id": "t", "content": ""}]


def test_settings_are_read_and_the_rest_stays_in_raw():
    request = parse(
        temperature=1, top_p=0.9, top_k=5, stop_sequences=["END", ""], stream=True, thinking={"type": "adaptive"},
        context_management={"edits": []}, metadata={"user_id": "u"}, service_tier="auto", container="c", betas=["b"],
        output_config={"effort": "high"},
    )  # fmt: skip
    asked = request.sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_new_tokens) == (1.0, 0.9, 5, 9)
    assert (asked.stop, asked.seed, request.stream, request.json_schema) == (["END"], None, True, None)
    assert request.raw["context_management"] == {"edits": []}
    assert not request.notes
    plain = PROTOCOL.parse({"messages": [USER]}).sampling
    assert (plain.temperature, plain.top_p, plain.top_k, plain.max_new_tokens, plain.stop) == (None,) * 4 + ([],)


def test_tools_keep_what_the_model_reads_and_those_of_the_provider_are_noted():
    schema = {"type": "object", "properties": {"c": {"type": "string"}}}
    request = parse(
        tools=[
            {"name": "bash", "description": "Run", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
            {"type": "custom", "name": "edit", "input_schema": schema, "strict": True, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "mcp_toolset", "mcp_server_name": "s"},
        ],
        mcp_servers=[{"type": "url", "url": "https://x"}],
    )
    assert request.tools == [
        {"type": "function", "function": {"name": "bash", "description": "Run", "parameters": schema}},
        {"type": "function", "function": {"name": "edit", "parameters": schema, "strict": True}},
    ]
    assert [note.partition(":")[0] for note in request.notes] == ["tools[2]", "tools[3]", "mcp_servers"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None, None)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, 1)),
        ({"type": "any"}, ("required", None, None)),
        ({"type": "tool", "name": "bash"}, ("required", "bash", None)),
        ({"type": "none"}, ("none", None, None)),
    ],
)
def test_tool_choice(choice, expected):
    request = parse(tools=[{"name": "bash", "input_schema": {}}], tool_choice=choice)
    assert (request.tool_choice, request.forced_tool, request.max_tool_calls) == expected


def test_structured_output_in_both_spellings():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert parse(output_config={"format": form}).json_schema == {"type": "object"}
    assert parse(output_format=form).json_schema == {"type": "object"}
    assert parse(output_format=None, output_config={"format": None}).json_schema is None


def test_a_prefill_is_refused_except_for_counting():
    history = [USER, {"role": "assistant", "content": "The answer is"}]
    with pytest.raises(InvalidRequest, match="last message"):
        parse(messages=history)
    assert len(PROTOCOL.parse({"messages": history}).messages) == 2
    # An empty one starts nothing.
    assert parse(messages=[USER, {"role": "assistant", "content": []}]).messages == [USER]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]},
         "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
         "messages[0].content[0].source"),
        ({"messages": [{"role": "assistant", "content": [PNG]}, USER]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, USER]},
         "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "x", "input": {"n": 2**70}}]}]}, "messages[0].content[0].input"),
        ({"system": [PNG]}, "system"),
        ({"system": 5}, "system"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "x", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"output_format": {"type": "text"}}, "output_format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(body, param):
    with pytest.raises(InvalidRequest) as caught:
        parse(**body)
    assert caught.value.param == param


_kinds = st.sampled_from(
    ["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document", "search_result"]
)
_block = st.fixed_dictionaries(
    {"type": _kinds | any_json},
    optional={
        "text": st.text(max_size=5) | any_json,
        "thinking": st.text(max_size=5) | any_json,
        "id": st.text(max_size=5) | any_json,
        "name": st.text(max_size=5) | any_json,
        "input": json_objects | any_json,
        "tool_use_id": st.text(max_size=5) | any_json,
        "content": st.text(max_size=5) | any_json | st.lists(st.just({"type": "text", "text": "x"}) | any_json),
        "source": st.fixed_dictionaries({"type": st.sampled_from(["text", "base64", "content", "url"])},
                                        optional={"data": any_json, "media_type": any_json, "content": any_json})
        | any_json,
        "title": any_json,
        "is_error": any_json,
    },
)  # fmt: skip
_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | any_json,
     "content": st.text(max_size=5) | st.lists(_block | any_json, max_size=4) | any_json}
)  # fmt: skip
_FIELDS = ("system", "max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream", "tools", "tool_choice",
           "output_config", "output_format", "mcp_servers")  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    body=st.fixed_dictionaries(
        {"messages": st.lists(_message | any_json, max_size=4) | any_json},
        optional={
            **dict.fromkeys(_FIELDS, any_json),
            "tools": st.lists(st.fixed_dictionaries({"name": any_json}, optional={"type": any_json}), max_size=2),
        },
    )
)
def test_any_body_is_read_or_refused(body):
    try:
        request = PROTOCOL.parse(body)
    except InvalidRequest as refused:
        PROTOCOL.error(refused)
        return
    assert isinstance(request, ModelRequest)
    for message in request.messages:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str) or request.has_images
        assert orjson.dumps(message)


@pytest.mark.parametrize("key", ["messages", *_FIELDS])
def test_a_deep_body_is_refused_or_passed_over(key):
    value = [{"type": "document", "role": "user", "name": "x"}]
    for _ in range(900):
        value = [
            {"type": "document", "role": "user", "content": value, "source": {"type": "content", "content": value}}
        ]
    try:
        PROTOCOL.parse({"messages": [USER], key: value})
    except InvalidRequest:
        pass


@settings(max_examples=150, deadline=None)
@given(message=messages(), data=st.data())
def test_an_answer_echoed_by_a_client_is_the_same_message_however_it_was_cut(message, data):
    reply = reply_of(message)
    body = PROTOCOL.reply(REQUEST, reply)
    assert orjson.loads(orjson.dumps(body)) == body
    plain = Message.model_validate(body)
    streamed = check_messages_stream(list(sse_events(stream(reply, data.draw(cuts(message))))))
    for answer in (plain, Message.model_validate(streamed)):
        echo = json.loads(json.dumps(answer.model_dump(mode="json", exclude_unset=True)["content"]))
        assert meaning(turns(*echo, role="assistant", before=[USER])[1]) == meaning(message)
    assert {key: streamed[key] for key in body if key != "content"} == {
        key: body[key] for key in body if key != "content"
    }


def test_the_body_of_an_answer():
    message = {"role": "assistant", "content": "Look:", "reasoning_content": "Hm.", "tool_calls": [call('{"c": 1}')]}
    assert PROTOCOL.reply(REQUEST, reply_of(message)) == {
        "id": "msg_ab12",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "ab12"},
            {"type": "text", "text": "Look:"},
            {"type": "tool_use", "id": "toolu_ab", "name": "bash", "input": {"c": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 40,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 60,
            "output_tokens": 7,
        },
    }
    assert PROTOCOL.reply(REQUEST, reply_of({"role": "assistant", "content": ""}))["content"] == []


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (reply_of({"role": "assistant", "content": "x"}), ("end_turn", None)),
        (reply_of({"role": "assistant", "content": "x"}, stop_sequence="END"), ("stop_sequence", "END")),
        (reply_of({"role": "assistant", "content": "x"}, finish_reason=FinishReason.LENGTH), ("max_tokens", None)),
        (reply_of({"role": "assistant", "content": "", "tool_calls": [call("{}")]}, finish_reason=FinishReason.LENGTH),
         ("max_tokens", None)),
    ],
)  # fmt: skip
def test_stop_reason_is_the_same_streamed_and_not(reply, expected):
    body = PROTOCOL.reply(REQUEST, reply)
    assert (body["stop_reason"], body["stop_sequence"]) == expected
    message = reply.choices[0].message
    whole = ReplyDelta(content=message["content"], tool_calls=message.get("tool_calls", ()))
    assert check_messages_stream(list(sse_events(stream(reply, [whole])))) == body


def test_reasoning_text_and_a_call_are_three_blocks_with_the_arguments_byte_for_byte():
    arguments = '{ "path":"a\\u00e9",  "n": 1.50 }'
    message = {"role": "assistant", "content": "ab", "reasoning_content": "xyz", "tool_calls": [call(arguments)]}
    deltas = [
        *[ReplyDelta(reasoning=piece) for piece in "xy"],
        ReplyDelta(reasoning="z", content="a"),
        ReplyDelta(content="b", tool_calls=[call(arguments)]),
    ]
    events = list(sse_events(stream(reply_of(message), deltas)))
    assert [name for name, _ in events] == [
        "message_start",
        *["content_block_start", *["content_block_delta"] * 4, "content_block_stop"],
        *["content_block_start", *["content_block_delta"] * 2, "content_block_stop"],
        *["content_block_start", "content_block_delta", "content_block_stop"],
        *["message_delta", "message_stop"],
    ]
    assert [data["index"] for _, data in events if "index" in data] == [0] * 6 + [1] * 4 + [2] * 3
    assert [data["delta"]["partial_json"] for _, data in events if "partial_json" in data.get("delta", {})] == [
        arguments
    ]
    assert events[0][1]["message"]["usage"]["input_tokens"] == 100


def client(body, seen=None):
    def answer(request):
        if seen is not None:
            seen.append(json.loads(request.content))
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body)

    transport = httpx2.MockTransport(answer)
    return anthropic.Anthropic(api_key="k", base_url="http://test", http_client=httpx2.Client(transport=transport))


def test_the_official_client_accumulates_the_plain_answer_over_pings():
    message = {
        "role": "assistant",
        "content": "Look:",
        "reasoning_content": "Hm.",
        "tool_calls": [call('{"c": 1}'), call("oops", "call_cd")],
    }
    reply = reply_of(message)
    written = PROTOCOL.stream(REQUEST, reply.head)
    body = b"".join([
        written.start(), written.heartbeat(), written.delta(0, ReplyDelta(reasoning="Hm.")), written.heartbeat(),
        written.delta(0, ReplyDelta(content="Look:", tool_calls=message["tool_calls"])), written.finish(reply),
    ])  # fmt: skip
    with client(body).messages.stream(model="m", max_tokens=9, messages=[USER]) as found:  # type: ignore
        final = found.get_final_message()
    found = final.model_dump(mode="json", exclude_unset=True)
    assert {key: found[key] for key in PROTOCOL.reply(REQUEST, reply)} == PROTOCOL.reply(REQUEST, reply)
    assert meaning(turns(*found["content"], role="assistant")[0]) == meaning(message)


def test_an_error_in_a_stream_reaches_the_official_client():
    written = PROTOCOL.stream(REQUEST, reply_of({"role": "assistant", "content": ""}).head)
    body = written.start() + written.error(UnavailableError("paused; try again"))
    with (
        pytest.raises(anthropic.APIStatusError, match="paused") as caught,
        client(body).messages.stream(model="m", max_tokens=9, messages=[USER]) as found,  # type: ignore
    ):
        found.get_final_message()
    assert caught.value.body["error"]["type"] == "overloaded_error"


class _TooLarge(EngineError):
    status = 413


class _Unknown(EngineError):
    status = 401


class _Busy(EngineError):
    status = 429


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("x", param="messages"), "invalid_request_error"),
        (_Unknown("x"), "authentication_error"),
        (ForbiddenError("x"), "permission_error"),
        (NotFoundError("x"), "not_found_error"),
        (ConflictError("x"), "invalid_request_error"),
        (_TooLarge("x"), "request_too_large"),
        (_Busy("x"), "rate_limit_error"),
        (UnavailableError("x"), "overloaded_error"),
        (EngineError("x"), "api_error"),
    ],
)
def test_errors_have_the_type_of_their_status(error, kind):
    assert PROTOCOL.error(error) == {"type": "error", "error": {"type": kind, "message": "x"}}


def test_an_overflow_is_told_in_the_words_that_harnesses_know():
    error = ContextOverflowError("This model's maximum context length is 8 tokens.")
    assert PROTOCOL.error(error)["error"]["message"].startswith("prompt is too long: ")
    error.num_prompt, error.context_limit = 9, 8  # pyright: ignore
    assert PROTOCOL.error(error)["error"]["message"] == "prompt is too long: 9 tokens > 8 maximum"


def test_token_counts_and_model_lists_are_the_official_types():
    assert MessageTokensCount.model_validate(PROTOCOL.token_count(5)).input_tokens == 5
    served = [ServedModel(id="a", context_limit=64, created_s=1.5), ServedModel(id="b", context_limit=64)]
    listed = PROTOCOL.models(served)
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "b", False)
    infos = [ModelInfo.model_validate(item) for item in listed["data"]]
    assert infos[0].created_at.timestamp() == 1.0
    assert [info.id for info in infos] == ["a", "b"]
    assert PROTOCOL.models([]) == {"data": [], "has_more": False, "first_id": None, "last_id": None}
