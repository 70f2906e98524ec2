"""Wire bodies to canonical requests and canonical replies to wire bodies."""

import json

import pytest

from manege.errors import ContextOverflowError, EngineError, ForbiddenError
from manege.protocols.base import InvalidRequest, ModelReply, TokenLogprob
from manege.protocols.chat import ChatCompletions
from manege.protocols.completions import Completions
from manege.types import FinishReason

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


def test_tools_keep_what_the_model_reads():
    tool = {"type": "function", "function": {"name": "bash", "strict": True, "parameters": {}, "description": None}}
    request = chat(tools=[tool], tool_choice="auto", parallel_tool_calls=True)
    assert request.tools == [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    assert request.max_tool_calls is None
    assert chat(tools=[tool], tool_choice="none").max_tool_calls == 0
    assert chat(tools=[tool], parallel_tool_calls=False).max_tool_calls == 1


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
        (chat, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0]"),
        (chat, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        (chat, {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
         "messages[0].tool_calls[0]"),
        (chat, {"tools": [{"type": "web_search"}]}, "tools[0]"),
        (chat, {"tool_choice": "required"}, "tool_choice"),
        (chat, {"tool_choice": {"type": "function", "function": {"name": "bash"}}}, "tool_choice"),
        (chat, {"response_format": {"type": "json_object"}}, "response_format"),
        (chat, {"stream": True}, "stream"),
        (chat, {"stream": "yes"}, "stream"),
        (chat, {"n": 2}, "n"),
        (chat, {"n": 0}, "n"),
        (chat, {"temperature": "hot"}, "temperature"),
        (chat, {"temperature": True}, "temperature"),
        (chat, {"temperature": 2.5}, "temperature"),
        (chat, {"top_p": -0.1}, "top_p"),
        (chat, {"max_tokens": 0}, "max_tokens"),
        (chat, {"max_tokens": 1.5}, "max_tokens"),
        (chat, {"stop": [1]}, "stop"),
        (chat, {"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
        (completion, {"prompt": None}, "prompt"),
        (completion, {"prompt": []}, "prompt"),
        (completion, {"prompt": ["a", "b"]}, "prompt"),
        (completion, {"prompt": [1, -1]}, "prompt"),
        (completion, {"prompt": [True]}, "prompt"),
        (completion, {"echo": True}, "echo"),
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
        (ForbiddenError("no"), "invalid_request_error", "forbidden"),
        (EngineError("gone"), "server_error", "engine_error"),
    ],
)
def test_errors_have_openais_shape(error, kind, code):
    body = ChatCompletions().error(error)["error"]
    assert body == {"message": str(error), "type": kind, "param": None, "code": code}


def reply(message, **changes):
    values = {
        "id": "1", "created_s": 5.5, "model": "m", "message": message, "finish_reason": FinishReason.STOP,
        "num_prompt": 7, "num_sampled": 2, "num_cached": 4,
    }  # fmt: skip
    return ModelReply(**{**values, **changes})


def test_chat_reply():
    body = ChatCompletions().reply(reply({"role": "assistant", "content": "Hello."}))
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello."},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert (body["id"], body["object"], body["created"]) == ("chatcmpl-1", "chat.completion", 5)


@pytest.mark.parametrize(
    ("finish_reason", "expected"), [(FinishReason.STOP, "tool_calls"), (FinishReason.LENGTH, "length")]
)
def test_tool_calls_finish_the_answer_unless_it_was_cut(finish_reason, expected):
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    choice = ChatCompletions().reply(reply(message, finish_reason=finish_reason))["choices"][0]
    assert choice["finish_reason"] == expected
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": [CALL]}


def test_logprobs_and_token_ids_where_asked():
    tokens = [TokenLogprob(text="Hé", logprob=-0.5), TokenLogprob(text="", logprob=-1.0)]
    message = {"role": "assistant", "content": "Hé"}
    body = ChatCompletions().reply(reply(message, logprobs=tokens, prompt_ids=[1, 2], response_ids=[3, 4]))
    assert [entry["logprob"] for entry in body["choices"][0]["logprobs"]["content"]] == [-0.5, -1.0]
    assert bytes(body["choices"][0]["logprobs"]["content"][0]["bytes"]).decode() == "Hé"
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == ([1, 2], [3, 4])
    choice = Completions().reply(reply({"text": "Hé"}, logprobs=tokens))["choices"][0]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("Hé", [-0.5, -1.0])
    assert choice["logprobs"]["text_offset"] == [0, 2]
