"""Responses: items to canonical messages, replies to items and event streams, and back without a loss."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from manege.errors import ContextOverflowError, EngineError, UnavailableError
from manege.protocols.base import InvalidRequest, ReplyDelta, TokenLogprob
from manege.protocols.responses import Responses
from manege.types import FinishReason
from tests.protocol_cases import deltas, fuzz, head, messages, openai_client, reply, stream, tool_call
from tests.stream_rules import check_chat_stream, check_responses_stream, read_events

SHELL = {"type": "function", "name": "shell", "description": "Runs.", "parameters": {"type": "object"}, "strict": True}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}
SPAWN = {"type": "function", "name": "spawn", "parameters": {}, "strict": False}
MULTI = {"type": "namespace", "name": "multi", "description": "Agents.", "tools": [SPAWN, SHELL]}
TOOLS = [MULTI, SHELL, PATCH, {"type": "web_search"}]
USER = {"role": "user", "content": "Hi"}


def parse(**body):
    return Responses().parse(json.loads(json.dumps({"model": "m", "input": "Hi", **body})))


def test_a_text_and_instructions_become_messages():
    request = parse(instructions="Be brief.")
    assert request.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert parse(instructions="").messages == [{"role": "user", "content": "Hi"}]


def test_items_become_canonical_messages():
    image = {"type": "input_image", "image_url": "data:x", "detail": "auto"}
    request = parse(
        tools=TOOLS,
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be"}]},
            {"role": "system", "content": "brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, image]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}], "phase": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "function_call", "call_id": "c1", "name": "spawn", "namespace": "multi", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ],
    )
    part = {"type": "image_url", "image_url": {"url": "data:x", "detail": "auto"}}
    assert request.messages == [
        {"role": "system", "content": "Be"},
        {"role": "system", "content": "brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, part]},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "Hm.",
            "tool_calls": [tool_call("c1", "spawn", "{}"), tool_call("c2", "patch", '{"input":"x"}')],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
        {"role": "tool", "content": "ok", "tool_call_id": "c2"},
        {"role": "assistant", "content": "No."},
    ]


def test_what_the_model_cannot_read_is_noted():
    request = parse(tools=[{"type": "web_search"}], input=[USER, {"type": "web_search_call", "id": "w"}])
    assert request.messages == [USER]
    assert request.notes == [
        "tools[0]: web_search is a hosted tool, which we do not have; left out",
        "input[1]: items of type 'web_search_call' mean nothing to the model; left out",
    ]


def test_tools_of_a_namespace_get_flat_names_that_are_unique():
    request = parse(tools=TOOLS)
    assert [tool["function"]["name"] for tool in request.tools] == ["spawn", "multi__shell", "shell", "patch"]
    assert request.tools[2]["function"] == {key: SHELL[key] for key in ("name", "description", "parameters", "strict")}
    message = {"role": "assistant", "content": "", "tool_calls": [
        tool_call(f"c{index}", tool["function"]["name"], "{}") for index, tool in enumerate(request.tools)
    ]}  # fmt: skip
    items = Responses().reply(request, reply(message))["output"]
    assert [(item["type"], item.get("namespace"), item["name"]) for item in items] == [
        ("function_call", "multi", "spawn"),
        ("function_call", "multi", "shell"),
        ("function_call", None, "shell"),
        ("custom_tool_call", None, "patch"),
    ]


def test_tools_may_also_come_among_the_items():
    request = parse(input=[{"type": "additional_tools", "role": "developer", "tools": [MULTI]}, USER])
    assert [tool["function"]["name"] for tool in request.tools] == ["spawn", "shell"]
    assert (request.messages, request.notes) == ([USER], [])


@pytest.mark.parametrize(
    ("choice", "expected", "forced", "num_left"),
    [
        (None, "auto", None, 4),
        ("none", "none", None, 4),
        ("required", "required", None, 4),
        ({"type": "function", "name": "shell"}, "required", "shell", 4),
        ({"type": "function", "name": "shell", "namespace": "multi"}, "required", "multi__shell", 4),
        ({"type": "custom", "name": "patch"}, "required", "patch", 4),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, SHELL, SPAWN]}, "auto", None, 2),
        ({"type": "allowed_tools", "mode": "required", "tools": [SPAWN]}, "required", "spawn", 4),
    ],
)
def test_tool_choice_has_all_its_forms(choice, expected, forced, num_left):
    request = parse(tools=TOOLS, tool_choice=choice)
    assert (request.tool_choice, request.forced_tool, len(request.tools)) == (expected, forced, num_left)


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        (None, None),
        ({"verbosity": "low"}, None),
        ({"format": {"type": "text"}}, None),
        ({"format": {"type": "json_object"}}, {}),
        ({"format": {"type": "json_schema", "name": "n", "schema": {"type": "array"}}}, {"type": "array"}),
    ],
)
def test_text_format_becomes_a_schema(text, schema):
    assert parse(text=text).json_schema == schema


def test_what_changes_nothing_here_is_tolerated():
    request = parse(
        store=True, include=["reasoning.encrypted_content"], prompt_cache_key="k", prompt_cache_retention="24h",
        client_metadata={"a": "b"}, metadata={"c": "d"}, truncation="auto", reasoning={"effort": "high"},
        background=False, previous_response_id=None, conversation=None, max_output_tokens=9, user="u",
        parallel_tool_calls=False,
    )  # fmt: skip
    assert (request.sampling.max_new_tokens, request.max_tool_calls, request.wants_logprobs) == (9, 1, False)
    assert request.raw["client_metadata"] == {"a": "b"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"instructions": ["a"]}, "instructions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": "x"}, "include"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": TOOLS}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(body, param):
    with pytest.raises(InvalidRequest) as caught:
        parse(**body)
    assert caught.value.param == param


def test_a_response_has_what_the_sdk_requires():
    request = parse(tools=TOOLS, temperature=0.5, metadata={"a": "b"}, instructions="Be.")
    answer = reply({"role": "assistant", "content": "c", "reasoning_content": "Hm."}, num_sampled=3)
    body = Responses().reply(request, answer)
    response = Response.model_validate(body)
    assert response.output_text == "c"
    assert (response.id, response.status, response.temperature) == ("resp_a1", "completed", 0.5)
    assert (response.instructions, response.metadata) == ("Be.", {"a": "b"})
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 3, 10)
    assert response.usage.input_tokens_details.cached_tokens == 4
    reasoning, message = body["output"]
    assert (reasoning["id"], message["id"]) == ("rs_a1_0", "msg_a1_1")
    assert reasoning["encrypted_content"] == "a1"


def test_an_answer_that_was_cut_is_incomplete():
    answer = reply({"role": "assistant", "content": "c"}, finish_reason=FinishReason.LENGTH)
    body = Responses().reply(parse(), answer)
    Response.model_validate(body)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"


def test_logprobs_stand_in_the_text_part_where_asked():
    request = parse(include=["message.output_text.logprobs"], stream=True)
    tokens = [TokenLogprob(text=text, logprob=-1.0) for text in "abc"]
    answer = reply({"role": "assistant", "content": "abc"}, logprobs=tokens)
    body = Responses().reply(request, answer)
    Response.model_validate(body)
    assert [entry["token"] for entry in body["output"][0]["content"][0]["logprobs"]] == ["a", "b", "c"]
    parts = [ReplyDelta(content="a", logprobs=tokens[:2]), ReplyDelta(content="bc"), ReplyDelta(logprobs=tokens[2:])]
    events = stream(Responses(), request, parts, answer)
    assert check_responses_stream(events)["output"] == body["output"]
    sent = [event["logprobs"] for name, event in events if name == "response.output_text.delta"]
    assert [[entry["token"] for entry in entries] for entries in sent] == [["a", "b"], []]


finishes = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


@settings(deadline=None)
@given(messages(), finishes, st.data())
def test_a_stream_ends_in_the_whole_response(message, finish_reason, data):
    request = parse(tools=TOOLS, stream=True)
    answer = reply(message, finish_reason=finish_reason)
    final = check_responses_stream(stream(Responses(), request, data.draw(deltas(message)), answer))
    assert final == Responses().reply(request, answer)


@settings(deadline=None)
@given(st.lists(messages(), min_size=1, max_size=2))
def test_replies_that_are_sent_back_are_the_same_messages(replies):
    request = parse(tools=TOOLS)
    items = []
    for index, message in enumerate(replies):
        answer = reply(message)
        opened = head(id=f"a{index}")
        items += Responses().reply(request, type(answer)(head=opened, num_cached=0, choices=answer.choices))["output"]
    assert parse(tools=TOOLS, input=[USER, *items]).messages == [USER, *replies]


@settings(deadline=None)
@given(messages(), messages(), st.data())
def test_things_that_come_in_another_order_are_the_same_message(first, second, data):
    parts = data.draw(deltas(first)) + data.draw(deltas(second | {"reasoning_content": ""}))
    whole = {"role": "assistant", "content": first["content"] + second["content"]}
    if "reasoning_content" in first:
        whole["reasoning_content"] = first["reasoning_content"]
    if calls := [call for part in parts for call in part.tool_calls]:
        whole["tool_calls"] = calls
    final = check_responses_stream(stream(Responses(), parse(tools=TOOLS, stream=True), parts, reply(whole)))
    assert parse(tools=TOOLS, input=[USER, *final["output"]]).messages == [USER, whole]


def test_items_without_ids_of_ours_are_one_message():
    items = [{"type": "reasoning", "summary": [{"text": "Hm."}]}, {"role": "assistant", "content": "a", "id": "msg_x"}]
    items.append({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_y"})
    assert len(parse(input=[USER, *items]).messages) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("gone"), "server_error"),
        (UnavailableError("later"), "server_error"),
        (ContextOverflowError("long"), "context_length_exceeded"),
        (InvalidRequest("what"), "invalid_prompt"),
    ],
)
def test_a_stream_that_fails_says_so_and_ends(error, code):
    answer = Responses().stream(parse(stream=True), head())
    sent = answer.start() + answer.delta(0, ReplyDelta(reasoning="a")) + answer.delta(0, ReplyDelta(content="b"))
    events = read_events(sent + answer.error(error))
    final = events[-1][1]["response"]
    assert final["error"] == {"code": code, "message": str(error)}
    assert [item["type"] for item in final["output"]] == ["reasoning"]
    if code != "context_length_exceeded":
        # The code by which harnesses know that they must shorten is none of the SDK's.
        check_responses_stream(events)


def test_errors_have_openais_shape():
    body = Responses().error(ContextOverflowError("long"))["error"]
    assert (body["code"], body["type"]) == ("context_length_exceeded", "invalid_request_error")


def test_the_sdk_reads_a_stream():
    message = {
        "role": "assistant",
        "content": "Hé",
        "reasoning_content": "Hm.",
        "tool_calls": [tool_call("c1", "shell", "{}")],
    }
    answer = Responses().stream(parse(tools=[SHELL], stream=True), head())
    sent = answer.start() + answer.delta(0, ReplyDelta(reasoning="Hm.", content="H")) + answer.heartbeat()
    sent += answer.delta(0, ReplyDelta(content="é", tool_calls=message["tool_calls"])) + answer.finish(reply(message))
    with openai_client(sent).responses.stream(model="m", input="Hi", tools=[SHELL]) as found:
        final = found.get_final_response()
    assert final.output_text == "Hé"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert (final.output[2].call_id, final.output[2].arguments) == ("c1", "{}")


MESSAGE = {
    "role": "assistant",
    "content": "bc",
    "reasoning_content": "a",
    "tool_calls": [tool_call("c1", "patch", "x")],
}
PARTS = [
    ReplyDelta(reasoning="a"), ReplyDelta(content="b"), ReplyDelta(content="c"),
    ReplyDelta(tool_calls=MESSAGE["tool_calls"]),
]  # fmt: skip


def test_the_rules_of_responses_notice_each_event_that_is_missing_or_doubled():
    answer = Responses().stream(parse(tools=TOOLS, stream=True), head())
    sent = answer.start() + b"".join(answer.delta(0, part) for part in PARTS) + answer.finish(reply(MESSAGE))
    events = read_events(sent)
    check_responses_stream(events)
    for position, (name, _) in enumerate(events):
        doubled = [] if name == "response.in_progress" else [events[: position + 1] + events[position:]]
        for wrong in [events[:position] + events[position + 1 :], *doubled]:
            counted = [(name, {**event, "sequence_number": index}) for index, (name, event) in enumerate(wrong)]
            with pytest.raises(AssertionError):
                check_responses_stream(counted)


def test_the_rules_of_chat_notice_chunks_that_are_missing_or_out_of_place():
    opening = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"tool_calls": [opening]},
              {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}]  # fmt: skip
    shared = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"})
    events = [(None, {**shared, "choices": [choice]}) for choice in choices] + [(None, "[DONE]")]
    assert check_chat_stream(events)[0]["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
    for position in (0, 2, 4, 5):
        with pytest.raises((AssertionError, KeyError)):
            check_chat_stream(events[:position] + events[position + 1 :])
    for position in (0, 2, 4, 5):
        with pytest.raises(AssertionError):
            check_chat_stream(events[: position + 1] + events[position:])


RICH = {
    "model": "m", "instructions": "i", "stream": True, "tools": TOOLS,
    "tool_choice": {"type": "function", "name": "shell"},
    "parallel_tool_calls": True, "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"}, "store": False, "background": False,
    "max_output_tokens": 9, "temperature": 1, "top_p": 1, "metadata": {"a": "b"}, "top_logprobs": 0,
    "truncation": "auto", "previous_response_id": None,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}]},
        {"type": "reasoning", "id": "rs_a1_0", "summary": [{"type": "summary_text", "text": "t"}],
         "encrypted_content": "a1", "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "id": "msg_a1_1", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "id": "fc_a1_2", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "i"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "o"},
        {"type": "additional_tools", "tools": [SHELL]},
    ],
}  # fmt: skip


@settings(deadline=None)
@given(fuzz(RICH))
def test_any_body_is_read_or_refused(body):
    try:
        request = Responses().parse(body)
    except InvalidRequest:
        return
    answer = reply(MESSAGE)
    json.dumps(Responses().reply(request, answer))
    stream(Responses(), request, PARTS, answer)
