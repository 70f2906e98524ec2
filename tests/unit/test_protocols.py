"""Chat completions and completions: wire bodies to canonical requests, canonical replies to bodies and streams."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from manege.errors import ContextOverflowError, EngineError, ForbiddenError, UnauthorizedError
from manege.protocols.base import InvalidRequest, ReplyDelta, ServedModel, TokenLogprob
from manege.protocols.chat import ChatCompletions
from manege.protocols.completions import Completions
from manege.types import FinishReason
from tests.protocol_cases import deltas, fuzz, head, messages, openai_client, reply, stream
from tests.stream_rules import check_chat_stream, read_events

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"c":"ls"}'}}


def parse(protocol, **body):
    return protocol.parse(json.loads(json.dumps(body)))


def chat(**body):
    return parse(ChatCompletions(), **{"model": "m", "messages": [USER], **body})


def completion(**body):
    return parse(Completions(), **{"model": "m", "prompt": "Hi", **body})


def test_messages_become_canonical():
    request = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "joe"},
            {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}], "reasoning": "Hm.", "x": 1},
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        ]
    )
    assert request.messages == [
        {"role": "system", "content": "Be"},
        {"role": "user", "content": "a\nb", "name": "joe"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "Hm."},
        {"role": "tool", "content": "a.txt", "tool_call_id": "c1"},
    ]


def test_images_are_kept_as_parts():
    text, image = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}
    request = chat(messages=[{"role": "user", "content": [text, {**image, "cache_control": {}}]}])
    assert request.messages[0]["content"] == [text, image]
    assert request.has_images
    assert not chat().has_images


@pytest.mark.parametrize(
    "field",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {"reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]},
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "Hm."}, {"type": "reasoning.encrypted"}]},
    ],
)
def test_all_spellings_of_reasoning_are_read(field):
    request = chat(messages=[USER, {"role": "assistant", "content": "a", **field}])
    assert request.messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "Hm."}


def test_a_refusal_is_what_the_assistant_said():
    refusal = [{"type": "refusal", "refusal": "No."}]
    for message in ({"content": None, "refusal": "No."}, {"content": refusal}):
        assert chat(messages=[USER, {"role": "assistant", **message}]).messages[1]["content"] == "No."


def test_unknown_fields_stay_in_raw():
    assert chat(prompt_cache_key="k", metadata={"a": 1}).raw["prompt_cache_key"] == "k"


def test_sampling_is_what_the_caller_said_and_none_elsewhere():
    asked = chat().sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.max_new_tokens) == (None,) * 5
    assert (asked.stop, asked.others) == ([], {})
    asked = chat(
        temperature=0, top_p=0.9, top_k=-1, seed=7, stop="END", max_tokens=9, max_completion_tokens=8, min_p=0.0,
        presence_penalty=0, frequency_penalty=0.5, logit_bias={"1": 2}, user="joe", n=1, stream=False,
    ).sampling  # fmt: skip
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.max_new_tokens) == (0.0, 0.9, 0, 7, 8)
    assert (asked.stop, asked.others) == (["END"], {"frequency_penalty": 0.5, "logit_bias": {"1": 2}})


def function(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def test_tools_keep_what_the_model_reads():
    tool = function("bash", strict=True, parameters={}, description=None, defer_loading=True)
    request = chat(tools=[tool, {"type": "web_search"}], tool_choice="auto", parallel_tool_calls=True)
    assert request.tools == [function("bash", strict=True, parameters={})]
    assert request.notes == ["tools[1]: web_search is a hosted tool, which we do not have; left out"]
    assert request.max_tool_calls is None
    assert chat(tools=[tool], parallel_tool_calls=False).max_tool_calls == 1


TOOLS = [function("a"), function("b"), {"type": "custom", "custom": {"name": "c"}}]


@pytest.mark.parametrize(
    ("choice", "expected", "forced", "left"),
    [
        (None, "auto", None, ["a", "b", "c"]),
        ("none", "none", None, ["a", "b", "c"]),
        ("required", "required", None, ["a", "b", "c"]),
        (function("b"), "required", "b", ["a", "b", "c"]),
        ({"type": "custom", "custom": {"name": "c"}}, "required", "c", ["a", "b", "c"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("a"), function("b")]}},
         "auto", None, ["a", "b"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("a")]}},
         "required", "a", ["a", "b", "c"]),
    ],
)  # fmt: skip
def test_tool_choice_has_all_its_forms(choice, expected, forced, left):
    request = chat(tools=TOOLS, tool_choice=choice)
    assert (request.tool_choice, request.forced_tool) == (expected, forced)
    assert [tool["function"]["name"] for tool in request.tools] == left


def test_a_free_text_tool_is_a_function_to_the_model_and_itself_to_the_caller():
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x+/"}}
    tools = [{"type": "custom", "custom": {"name": "patch", "description": "Patches.", "format": grammar}}]
    custom = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": '*** Begin\n"é"'}}
    answered = {"role": "assistant", "content": None, "tool_calls": [custom]}
    request = chat(tools=tools, messages=[USER, answered], stream=True)
    declared = request.tools[0]["function"]
    assert (declared["name"], declared["description"]) == ("patch", "Patches.")
    assert "start: /x+/" in declared["parameters"]["properties"]["input"]["description"]
    message = request.messages[1]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"input": custom["custom"]["input"]}
    body = ChatCompletions().reply(request, reply(message))
    ChatCompletion.model_validate(body)
    assert body["choices"][0]["message"]["tool_calls"] == [custom]
    events = stream(ChatCompletions(), request, [ReplyDelta(tool_calls=message["tool_calls"])], reply(message))
    assert check_chat_stream(events)[0]["message"]["tool_calls"] == [custom]
    call = {"id": "c2", "type": "function", "function": {"name": "patch", "arguments": "not JSON"}}
    shown = ChatCompletions().reply(request, reply({"role": "assistant", "content": "", "tool_calls": [call]}))
    assert shown["choices"][0]["message"]["tool_calls"][0]["custom"]["input"] == "not JSON"


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}, {"type": "array"}),
    ],
)
def test_response_format_becomes_a_schema(wanted, schema):
    assert chat(response_format=wanted).json_schema == schema


def test_streams_and_choices_as_asked():
    request = chat(stream=True, n=3)
    assert (request.stream, request.num_choices, request.wants_usage) == (True, 3, False)
    assert chat(stream=True, stream_options={"include_usage": True}).wants_usage
    assert chat(stream=False, stream_options=None).wants_usage


@pytest.mark.parametrize("top_logprobs", [{}, {"top_logprobs": None}, {"top_logprobs": 0}])
def test_logprobs_without_alternatives(top_logprobs):
    assert chat(logprobs=True, **top_logprobs).wants_logprobs


@pytest.mark.parametrize("prompt", ["Hi", [1, 2], ["Hi"], [[1, 2]]])
def test_completion_takes_one_text_or_one_list_of_ids(prompt):
    asked = completion(prompt=prompt)
    assert asked.prompt in ("Hi", [1, 2])
    assert asked.sampling.max_new_tokens == 16


@pytest.mark.parametrize(
    ("make", "body", "param"),
    [
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": "Hi"}, "messages"),
        (chat, {"messages": ["Hi"]}, "messages[0]"),
        (chat, {"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0]"),
        (chat, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (chat, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (chat, {"messages": [{"role": ["user"], "content": "Hi"}]}, "messages[0]"),
        (chat, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
         "messages[0].content[0]"),
        (chat, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0]"),
        (chat, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (chat, {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
         "messages[0].tool_calls[0].custom"),
        (chat, {"messages": [{"role": "assistant", "tool_calls": [{"id": 5, "function": CALL["function"]}]}]},
         "messages[0].tool_calls[0].id"),
        (chat, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0]"),
        (chat, {"functions": [{"name": "f"}]}, "functions"),
        (chat, {"tools": ["bash"]}, "tools[0]"),
        (chat, {"tools": {"type": "function"}}, "tools"),
        (chat, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (chat, {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
         "tools[0].function.parameters"),
        (chat, {"tool_choice": "required"}, "tool_choice"),
        (chat, {"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        (chat, {"tool_choice": "maybe"}, "tool_choice"),
        (chat, {"tool_choice": {"type": "function", "function": {"name": "bash"}}}, "tool_choice"),
        (chat, {"tool_choice": {"type": "web_search"}}, "tool_choice"),
        (chat, {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (chat, {"response_format": {"type": "xml"}}, "response_format"),
        (chat, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (chat, {"stream": "yes"}, "stream"),
        (chat, {"stream": True, "stream_options": 1}, "stream_options"),
        (chat, {"n": 0}, "n"),
        (chat, {"n": 1000}, "n"),
        (chat, {"temperature": float("nan")}, "temperature"),
        (chat, {"temperature": "hot"}, "temperature"),
        (chat, {"temperature": True}, "temperature"),
        (chat, {"temperature": 2.5}, "temperature"),
        (chat, {"top_p": -0.1}, "top_p"),
        (chat, {"max_tokens": 0}, "max_tokens"),
        (chat, {"max_tokens": 1.5}, "max_tokens"),
        (chat, {"stop": [1]}, "stop[0]"), (chat, {"stop": 1}, "stop"),
        (chat, {"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
        (completion, {"prompt": None}, "prompt"),
        (completion, {"prompt": []}, "prompt"),
        (completion, {"prompt": ["a", "b"]}, "prompt"),
        (completion, {"prompt": [1, -1]}, "prompt"),
        (completion, {"prompt": [True]}, "prompt"),
        (completion, {"echo": True}, "echo"),
        (completion, {"suffix": "x"}, "suffix"),
        (completion, {"best_of": 2}, "best_of"),
        (completion, {"logprobs": 5}, "logprobs"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(make, body, param):
    with pytest.raises(InvalidRequest) as caught:
        make(**body)
    assert caught.value.param == param
    error = ChatCompletions().error(caught.value)["error"]
    assert error == {"message": str(caught.value), "type": "invalid_request_error", "param": param, "code": None}


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ContextOverflowError("too long"), "invalid_request_error", "context_length_exceeded"),
        (UnauthorizedError("no key"), "invalid_request_error", "invalid_api_key"),
        (ForbiddenError("no"), "invalid_request_error", "forbidden"),
        (EngineError("gone"), "server_error", "engine_error"),
    ],
)
def test_errors_have_openais_shape(error, kind, code):
    body = ChatCompletions().error(error)["error"]
    assert body == {"message": str(error), "type": kind, "param": None, "code": code}


def test_a_chat_reply_is_the_message_with_its_token_counts():
    body = ChatCompletions().reply(chat(), reply({"role": "assistant", "content": "Hello."}))
    ChatCompletion.model_validate(body)
    message = {"role": "assistant", "content": "Hello.", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert (body["id"], body["object"], body["created"]) == ("chatcmpl-a1", "chat.completion", 5)


@pytest.mark.parametrize(
    ("finish_reason", "expected"), [(FinishReason.STOP, "tool_calls"), (FinishReason.LENGTH, "length")]
)
def test_tool_calls_finish_the_answer_unless_it_was_cut(finish_reason, expected):
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    choice = ChatCompletions().reply(chat(), reply(message, finish_reason=finish_reason))["choices"][0]
    assert choice["finish_reason"] == expected
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}


TOKENS = [TokenLogprob(text="Hé", logprob=-0.5), TokenLogprob(text="", logprob=-1.0)]


def test_logprobs_and_token_ids_where_asked():
    answer = reply({"role": "assistant", "content": "Hé"}, logprobs=TOKENS, prompt_ids=[1, 2], response_ids=[3, 4])
    body = ChatCompletions().reply(chat(logprobs=True), answer)
    ChatCompletion.model_validate(body)
    assert [entry["logprob"] for entry in body["choices"][0]["logprobs"]["content"]] == [-0.5, -1.0]
    assert bytes(body["choices"][0]["logprobs"]["content"][0]["bytes"]).decode() == "Hé"
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == ([1, 2], [3, 4])
    assert ChatCompletions().reply(chat(), answer)["choices"][0]["logprobs"] is None
    body = Completions().reply(completion(logprobs=1), reply({"text": "Hé"}, logprobs=TOKENS))
    Completion.model_validate(body)
    choice = body["choices"][0]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("Hé", [-0.5, -1.0])
    assert choice["logprobs"]["text_offset"] == [0, 2]


def test_the_stop_string_that_ended_an_answer_is_told():
    body = ChatCompletions().reply(chat(), reply({"role": "assistant", "content": "a"}, stop_sequence="END"))
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", "END")


@settings(deadline=None)
@given(messages(), st.data())
def test_a_chat_stream_adds_up_to_the_whole_reply(message, data):
    usage = data.draw(st.booleans())
    request = chat(stream=True, logprobs=True, return_token_ids=True, stream_options={"include_usage": usage})
    parts = data.draw(deltas(message))
    ids = [id for delta in parts for id in delta.response_ids]
    answer = reply(message, response_ids=ids, logprobs=[entry for delta in parts for entry in delta.logprobs])
    events = stream(ChatCompletions(), request, parts, answer)
    (choice,) = check_chat_stream(events, wants_usage=usage)
    whole = ChatCompletions().reply(request, answer)["choices"][0]
    assert choice["message"] == message
    assert choice["finish_reason"] == whole["finish_reason"]
    assert choice["token_ids"] == whole["token_ids"] == ids
    assert choice["logprobs"] == whole["logprobs"]["content"]


def test_choices_are_streamed_side_by_side():
    request = chat(stream=True, n=2, return_token_ids=True)
    protocol, opened = ChatCompletions(), head(prompt_ids=[1, 2])
    answer = protocol.stream(request, opened)
    sent = answer.start()
    for choice, content in [(1, "b"), (0, "a"), (1, "B"), (0, "A")]:
        sent += answer.delta(choice, ReplyDelta(content=content, response_ids=[choice]))
    sent += answer.heartbeat()
    sent += answer.finish(reply({"role": "assistant", "content": "aA"}, {"role": "assistant", "content": "bB"}))
    events = read_events(sent)
    choices = check_chat_stream(events, num_choices=2)
    assert [choice["message"]["content"] for choice in choices] == ["aA", "bB"]
    assert [choice["token_ids"] for choice in choices] == [[0, 0], [1, 1]]
    assert [chunk.get("prompt_token_ids") for _, chunk in events[:-1]] == [[1, 2]] + [None] * (len(events) - 2)


def test_prompt_ids_that_were_not_known_at_the_start_come_at_the_end():
    for protocol, request, message in [
        (ChatCompletions(), chat(stream=True, return_token_ids=True), {"role": "assistant", "content": ""}),
        (Completions(), completion(stream=True, return_token_ids=True), {"text": ""}),
    ]:
        events = stream(protocol, request, [], reply(message, prompt_ids=[1, 2]))
        last = events[-2][1]
        assert (last.get("prompt_token_ids") or last["choices"][0]["prompt_token_ids"]) == [1, 2]


def test_a_chat_stream_that_fails_ends_with_the_error():
    answer = ChatCompletions().stream(chat(stream=True), head())
    events = read_events(answer.start() + answer.error(EngineError("gone")))
    assert events[-1][1]["error"]["code"] == "engine_error"


def test_the_sdk_reads_a_chat_stream():
    message = {"role": "assistant", "content": "Hé", "tool_calls": [CALL, CALL | {"id": "c2"}]}
    request = chat(stream=True)
    parts = [
        ReplyDelta(content="H"),
        ReplyDelta(content="é", tool_calls=[CALL]),
        ReplyDelta(tool_calls=[CALL | {"id": "c2"}]),
    ]
    answer = ChatCompletions().stream(request, head())
    sent = answer.start() + answer.heartbeat() + b"".join(answer.delta(0, part) for part in parts)
    client = openai_client(sent + answer.finish(reply(message)))
    tool = {"type": "function", "function": {"name": "bash", "parameters": {}, "strict": True}}
    with client.chat.completions.stream(model="m", messages=[USER], tools=[tool]) as found:
        final = found.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == ("Hé", "tool_calls")
    assert [(call.id, call.function.arguments) for call in final.message.tool_calls] == [
        ("c1", CALL["function"]["arguments"]),
        ("c2", CALL["function"]["arguments"]),
    ]


def test_a_completion_stream_adds_up():
    request = completion(stream=True, n=2, logprobs=1, return_token_ids=True, stream_options={"include_usage": True})
    answer = Completions().stream(request, head(prompt_ids=[1]))
    sent = answer.start()
    for choice in (0, 1, 0):
        sent += answer.delta(choice, ReplyDelta(content="ab", response_ids=[7], logprobs=TOKENS[:1]))
    sent += answer.delta(1, ReplyDelta()) + answer.finish(reply({"text": "abab"}, {"text": "ab"}))
    *events, usage, done = [event for _, event in read_events(sent)]
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)
    chunks = [event["choices"][0] for event in events]
    assert [(chunk["index"], chunk["text"]) for chunk in chunks] == [
        (0, ""), (1, ""), (0, "ab"), (1, "ab"), (0, "ab"), (0, ""), (1, "")
    ]  # fmt: skip
    assert [chunk["prompt_token_ids"] for chunk in chunks[:2]] == [[1], [1]]
    assert [chunk["logprobs"]["text_offset"] for chunk in chunks[2:5]] == [[0], [0], [2]]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"] * 2


def test_models_are_listed():
    model = ServedModel(id="m", context_limit=100, created_s=3.5)
    assert ChatCompletions().models([model])["data"] == [ChatCompletions().model(model)]
    assert ChatCompletions().model(model)["max_model_len"] == 100


RICH_CHAT = {
    "model": "m", "stream": True, "stream_options": {"include_usage": True}, "n": 2, "temperature": 1, "top_p": 0.5,
    "top_k": 3, "seed": 1, "stop": ["x"], "max_tokens": 5, "max_completion_tokens": 5, "logprobs": True,
    "top_logprobs": 0, "return_token_ids": True, "parallel_tool_calls": False, "tool_choice": function("a"),
    "tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "functions": None, "min_p": 0, "logit_bias": {},
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": None, "refusal": "r", "reasoning_details": [{"text": "t"}], "name": "n",
         "tool_calls": [CALL, {"id": "c", "type": "custom", "custom": {"name": "c", "input": "i"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}]},
    ],
}  # fmt: skip
RICH_COMPLETION = {
    "model": "m", "prompt": [[1, 2]], "stream": True, "stream_options": {"include_usage": True}, "n": 2, "best_of": 1,
    "logprobs": 1, "echo": False, "suffix": "", "max_tokens": 3, "stop": "x", "return_token_ids": False,
}  # fmt: skip


@settings(deadline=None)
@given(fuzz(RICH_CHAT))
def test_any_chat_body_is_read_or_refused(body):
    try:
        request = ChatCompletions().parse(body)
    except InvalidRequest:
        return
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answer = reply(*[message] * request.num_choices)
    json.dumps(ChatCompletions().reply(request, answer))
    stream(ChatCompletions(), request, [ReplyDelta(tool_calls=[CALL])], answer)


@settings(deadline=None)
@given(fuzz(RICH_COMPLETION))
def test_any_completion_body_is_read_or_refused(body):
    try:
        request = Completions().parse(body)
    except InvalidRequest:
        return
    stream(Completions(), request, [ReplyDelta(content="a")], reply(*[{"text": "a"}] * request.num_choices))
