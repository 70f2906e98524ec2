"""Streams by the official clients: token by token, the same message as whole, every id recorded."""

import asyncio
import time

import anthropic
import numpy as np
import openai
import pytest
from google.genai import types as genai_types

from manege.types import FinishReason
from tests.stream_rules import check_chat_stream, check_responses_stream
from tests.stream_rules_messages import check_gemini_stream, check_messages_stream
from tests.system.agents.asking import BASH, CALL, ask, calls_of, events, until, user

pytestmark = pytest.mark.anyio

TEXT = f"Looking at it – näïve 🙂 text. {CALL}"
CLAUDE_TOOL = {"name": "bash", "input_schema": {"type": "object"}}
RESPONSES_TOOL = {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False}
GEMINI_TOOL = {"functionDeclarations": [{"name": "bash", "parametersJsonSchema": {"type": "object"}}]}


async def sampled(store):
    *_, call = await calls_of(store)
    return call


async def test_chat_stream_is_the_whole_message_and_the_ids_are_complete(agent, store):
    ids, chunks = [], 0
    stream = await ask(
        agent,
        [user(f"say {TEXT}")],
        tools=[BASH],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    content, arguments = "", ""
    async for chunk in stream:
        chunks += 1
        for choice in chunk.choices:
            content += choice.delta.content or ""
            arguments += "".join(call.function.arguments or "" for call in choice.delta.tool_calls or ())
            ids += getattr(choice, "token_ids", None) or []
    call = await sampled(store)
    assert (content, arguments) == ("Looking at it – näïve 🙂 text.", '{"c":  "ls"}')
    assert ids == call.response_ids_R.tolist()
    assert chunk.usage.completion_tokens == len(ids)
    assert call.reply["tool_calls"][0]["function"]["arguments"] == arguments
    assert chunks > 20


async def test_claude_stream(claude, store):
    asked = {"model": "any", "max_tokens": 300, "messages": [user(f"say {TEXT}")], "tools": [CLAUDE_TOOL]}
    async with claude.messages.stream(**asked) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    whole = await claude.messages.create(**asked)
    assert "".join(texts) == "Looking at it – näïve 🙂 text."
    assert len(texts) > 20
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert [block.type for block in final.content] == [block.type for block in whole.content] == ["text", "tool_use"]
    assert final.content[1].input == whole.content[1].input == {"c": "ls"}
    assert final.usage.output_tokens == whole.usage.output_tokens == len((await sampled(store)).response_ids_R)


async def test_responses_stream(agent, store):
    asked = {"model": "any", "input": f"say {TEXT}", "tools": [RESPONSES_TOOL]}
    texts = []
    async with agent.responses.stream(**asked) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
        final = await stream.get_final_response()
    whole = await agent.responses.create(**asked)
    for response in (final, whole):
        message, call = response.output
        assert message.content[0].text == "".join(texts) == "Looking at it – näïve 🙂 text."
        assert (call.name, call.arguments) == ("bash", '{"c":  "ls"}')
    assert len(texts) > 20
    assert final.usage.output_tokens == len((await sampled(store)).response_ids_R)


async def test_gemini_stream(gemini, store):
    config = genai_types.GenerateContentConfig(tools=[GEMINI_TOOL])
    asked = {"model": "any", "contents": f"say {TEXT}", "config": config}
    parts = []
    async for chunk in await gemini.aio.models.generate_content_stream(**asked):
        parts += [part for candidate in chunk.candidates or () for part in (candidate.content.parts or ())]
    whole = await gemini.aio.models.generate_content(**asked)
    assert "".join(part.text or "" for part in parts) == whole.text == "Looking at it – näïve 🙂 text."
    [call] = [part.function_call for part in parts if part.function_call]
    assert (call.name, call.args) == ("bash", {"c": "ls"})
    assert whole.function_calls[0].args == {"c": "ls"}
    assert len(parts) > 20
    assert chunk.usage_metadata.candidates_token_count == len((await sampled(store)).response_ids_R)


async def test_text_completion_stream(agent, store):
    stream = await agent.completions.create(
        model="any", prompt="say Hello you\nassistant\n", max_tokens=30, stream=True
    )
    texts = [choice.text async for chunk in stream for choice in chunk.choices]
    assert "".join(texts) == "Hello you"
    assert len(texts) >= 9
    assert len((await sampled(store)).response_ids_R) == 10


@pytest.mark.parametrize(
    ("path", "body", "check"),
    [
        ("/v1/chat/completions", {"messages": [user(f"say {TEXT}")], "tools": [BASH]}, check_chat_stream),
        ("/v1/responses", {"input": f"say {TEXT}", "tools": [RESPONSES_TOOL]}, check_responses_stream),
        (
            "/v1/messages?beta=true",
            {"messages": [user(f"say {TEXT}")], "tools": [CLAUDE_TOOL], "max_tokens": 300},
            check_messages_stream,
        ),
    ],
)
async def test_stream_keeps_the_rules_of_its_protocol(http, path, body, check):
    answer = await http.post(path, json={**body, "model": "any", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    check(events(answer.text))


@pytest.mark.parametrize("alt", ["?alt=sse", ""])
async def test_gemini_stream_keeps_the_rules_in_both_forms(http, alt):
    body = {"contents": [{"role": "user", "parts": [{"text": f"say {TEXT}"}]}], "tools": [GEMINI_TOOL]}
    answer = await http.post(f"/v1beta/models/any:streamGenerateContent{alt}", json=body)
    check_gemini_stream([data for _, data in events(answer.text)] if alt else answer.json())


async def test_tokens_arrive_while_the_engine_samples(http, engine, store):
    """The first text is here long before the last token is sampled, and the call is stored before the last event."""
    engine._token_delay_s = 0.01
    body = {"messages": [user("say " + "x" * 100)], "stream": True}
    started, first = time.monotonic(), None
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if first is None and '"x"' in line:
                first = time.monotonic() - started
            if "finish_reason" in line and '"stop"' in line:
                assert len(await calls_of(store)) == 1
    assert first is not None
    assert first < (time.monotonic() - started) / 2


async def test_one_slow_stream_does_not_stall_another(http, store):
    """A reader that stops reading blocks nobody."""
    body = {"messages": [user("say " + "x" * 300)], "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=body):
        answer = await http.post("/v1/chat/completions", json={"messages": [user("say Hi")]})
    assert answer.json()["choices"][0]["message"]["content"] == "Hi"


async def test_answer_cut_inside_a_tool_call_is_cut_in_every_form(agent, claude, store):
    messages = [user(f"say {CALL}")]
    stream = await ask(agent, messages, tools=[BASH], max_tokens=30, stream=True)
    reasons = [choice.finish_reason async for chunk in stream for choice in chunk.choices if choice.finish_reason]
    whole = await ask(agent, messages, tools=[BASH], max_tokens=30)
    asked = {"model": "any", "max_tokens": 30, "messages": messages, "tools": [CLAUDE_TOOL]}
    async with claude.messages.stream(**asked) as messages_stream:
        final = await messages_stream.get_final_message()
    response = await agent.responses.create(
        model="any", input=f"say {CALL}", tools=[RESPONSES_TOOL], max_output_tokens=30
    )
    assert reasons == [whole.choices[0].finish_reason] == ["length"]
    assert whole.choices[0].message.tool_calls is None
    assert final.stop_reason == "max_tokens"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert {call.finish_reason for call in await calls_of(store)} == {FinishReason.LENGTH}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_is_a_call_of_its_own(agent, store, stream):
    texts = {}
    options = {"n": 3, "logprobs": True, "extra_body": {"return_token_ids": True}}
    if stream:
        async for chunk in await ask(agent, [user("say Hi")], stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    else:
        answer = await ask(agent, [user("say Hi")], **options)
        texts = {choice.index: choice.message.content for choice in answer.choices}
        assert answer.usage.completion_tokens == 9
    assert texts == {0: "Hi", 1: "Hi", 2: "Hi"}
    calls = await calls_of(store)
    assert len({call.id for call in calls}) == 3
    assert all(np.array_equal(call.prompt_ids_P, calls[0].prompt_ids_P) for call in calls)


async def test_engine_that_fails_during_a_stream_ends_it_with_an_error(agent, claude, engine, store):
    engine._token_delay_s = 0.01

    async def close_soon():
        async def sampling():
            return (await engine.info()).stats["sampled"] > 5

        await until(sampling)
        await engine.close()

    closing = asyncio.create_task(close_soon())
    with pytest.raises(openai.APIError, match="engine was closed"):
        async for _ in await ask(agent, [user("say " + "x" * 200)], stream=True):
            pass
    await closing
    with pytest.raises(anthropic.APIStatusError, match="engine is closed"):
        await claude.with_options(max_retries=0).messages.create(model="any", max_tokens=9, messages=[user("say Hi")])
    [call] = await calls_of(store)
    assert (call.finish_reason, call.delivered) == (FinishReason.ABORT, "no")
    kinds = [event.event_type for event in await store.events(call.rollout_id)]
    assert kinds == ["call.error", "call.error"]


async def test_token_counts_are_those_of_the_same_request(claude, gemini, store):
    asked = {"model": "any", "messages": [user("say Hi")], "system": "Be brief.", "tools": [CLAUDE_TOOL]}
    count = await claude.messages.count_tokens(**asked)
    await claude.messages.create(**asked, max_tokens=20)
    assert count.input_tokens == len((await sampled(store)).prompt_ids_P)
    contents = "say Hi"
    counted = await gemini.aio.models.count_tokens(model="any", contents=contents)
    await gemini.aio.models.generate_content(model="any", contents=contents)
    assert counted.total_tokens == len((await sampled(store)).prompt_ids_P)
