"""Clients that go away, come back, or wait while weights change: nothing is lost, nothing is counted twice."""

import asyncio
import time

import anthropic
import httpx
import openai
import pytest

from manege.gateway.flights import GRACE_S
from manege.gateway.inference import SILENCE_S
from manege.types import Delivered, FinishReason
from tests.system.agents.asking import ask, calls_of, events, until, user

pytestmark = pytest.mark.anyio

LONG = user("say " + "x" * 350)


async def sampling(engine, num=5):
    async def started():
        return (await engine.info()).stats["sampled"] >= num

    await until(started)


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts_within_two_seconds_and_is_recorded(engine, agent, store, stream):
    engine._token_delay_s = 0.05
    asking = asyncio.create_task(drain(agent, stream))
    await sampling(engine)
    asking.cancel()
    left = time.monotonic()

    async def stopped():
        return (await engine.info()).num_running == 0

    await until(stopped, timeout_s=2)
    assert time.monotonic() - left < 2

    async def recorded():
        return len(await calls_of(store)) == 1

    await until(recorded)
    [call] = await calls_of(store)
    assert (call.delivered, call.finish_reason) == (Delivered.NO, FinishReason.ABORT)
    assert len(call.response_ids_R) == len(call.logprobs_R) >= 5


async def drain(agent, stream):
    answer = await ask(agent.with_options(max_retries=0), [LONG], stream=stream)
    if not stream:
        return answer.choices[0].message.content
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])


@pytest.mark.parametrize("again", [False, True])
async def test_request_sent_again_takes_over_the_answer_under_way(engine, agent, store, again):
    """`again`: whether the second copy streams."""
    engine._token_delay_s = 0.004
    first = asyncio.create_task(drain(agent, stream=False))
    await sampling(engine, 50)
    first.cancel()
    assert await drain(agent, stream=again) == "x" * 350

    async def noted():
        return [call.delivered for call in await calls_of(store)] == [Delivered.YES]

    await until(noted)
    assert (await engine.info()).stats["sampled"] == 351


async def test_answer_that_ended_after_its_client_left_is_not_delivered(engine, agent, store):
    """It is another one's parent only if somebody took it."""
    engine._token_delay_s = 0.002
    first = asyncio.create_task(drain(agent, stream=False))
    await sampling(engine, 300)
    first.cancel()

    async def noted():
        return [call.delivered for call in await calls_of(store)] == [Delivered.NO]

    await until(noted)
    await asyncio.sleep(GRACE_S)
    history = [LONG, {"role": "assistant", "content": "x" * 350}, user("say Bye")]
    await ask(agent, history)
    assert (await calls_of(store))[1].parent is None


async def test_clients_that_stay_never_share_an_answer(engine, agent, store):
    engine._token_delay_s = 0.002
    answers = await asyncio.gather(*(drain(agent, stream=bool(number % 2)) for number in range(3)))
    assert answers == ["x" * 350] * 3
    assert len(await calls_of(store)) == 3


async def test_a_hundred_clients_that_are_killed_disturb_nobody(engine, http, key, gateway, store):
    engine._token_delay_s = 0.002

    async def leave(number):
        async with httpx.AsyncClient(base_url=gateway.url, headers=http.headers, trust_env=False) as client:
            with pytest.raises(httpx.TimeoutException):
                await client.post("/v1/chat/completions", json={"messages": [LONG], "user": str(number)}, timeout=0.3)

    body = {"messages": [LONG], "stream": True}
    async with asyncio.TaskGroup() as group:
        staying = group.create_task(http.post("/v1/chat/completions", json=body))
        for number in range(100):
            group.create_task(leave(number))
    text = "".join(
        data["choices"][0]["delta"].get("content") or ""
        for _, data in events(staying.result().text)
        if data != "[DONE]"
    )
    assert text == "x" * 350

    async def stopped():
        return (await engine.info()).num_running == 0

    await until(stopped)


BEATS = {
    "/v1/chat/completions": b": ",
    "/v1/messages": b"event: ping",
    "/v1/responses": b"event: response.in_progress",
}


async def test_held_streams_open_at_once_and_beat(http, gateway, store):
    """In real time: each opens within a second, and is heard of again within SILENCE_S."""
    await gateway.services.pauses.pause(1)
    opened = asyncio.get_running_loop().time()
    resumed = asyncio.Event()

    async def held(path, beat):
        body = {"messages": [user("say Hi")], "input": "say Hi", "max_tokens": 50, "stream": True}
        async with http.stream("POST", path, json=body) as answer:
            assert asyncio.get_running_loop().time() - opened < 1
            assert answer.status_code == 200
            parts, seen = answer.aiter_bytes(), b""
            # Responses opens with the event that is its beat.
            while seen.count(beat) < 1 + (path == "/v1/responses"):
                seen += await anext(parts)
            assert asyncio.get_running_loop().time() - opened < SILENCE_S + 2
            await resumed.wait()
            async for part in parts:
                seen += part
        assert b'"H"' in seen
        assert b'"i"' in seen

    async with asyncio.TaskGroup() as group:
        for path, beat in BEATS.items():
            group.create_task(held(path, beat))
        await asyncio.sleep(SILENCE_S + 1)
        await gateway.services.pauses.resume()
        resumed.set()
    assert [call.reply["content"] for call in await calls_of(store)] == ["Hi"] * 3


async def test_plain_call_is_held_for_less_than_its_client_waits(gateway, agent, http):
    await gateway.services.pauses.pause(1)
    body = {"messages": [user("say Hi")]}
    answer = await http.post("/v1/chat/completions", json=body, headers={"x-stainless-read-timeout": "11"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "weights are being changed" in answer.json()["error"]["message"]
    await gateway.services.pauses.resume()
    assert await ask(agent, [user("say Hi")])


@pytest.mark.full
@pytest.mark.timeout(200)
async def test_a_minute_of_pause_with_stock_clients_loses_nothing(gateway, agent, claude, store):
    await _pause_of(60, gateway, agent, claude, store, stream=False)


@pytest.mark.full
@pytest.mark.timeout(500)
async def test_five_and_a_half_minutes_of_pause_with_streams_lose_nothing(gateway, agent, claude, store):
    await _pause_of(330, gateway, agent, claude, store, stream=True)


async def _pause_of(seconds, gateway, agent: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, store, *, stream):
    await gateway.services.pauses.pause(1)

    async def by_chat(number):
        answer = await ask(agent, [user(f"say Hi {number}")], stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    async def by_messages(number):
        asked = {"model": "any", "max_tokens": 50, "messages": [user(f"say Ho {number}")]}
        if not stream:
            return (await claude.messages.create(**asked)).content[0].text
        async with claude.messages.stream(**asked) as answer:
            return await answer.get_final_text()

    async def by_responses(number):
        asked = {"model": "any", "input": f"say Ha {number}"}
        if not stream:
            return (await agent.responses.create(**asked)).output_text
        async with agent.responses.stream(**asked) as answer:
            return (await answer.get_final_response()).output_text

    asking = [asyncio.create_task(by(number)) for number in range(4) for by in (by_chat, by_messages, by_responses)]
    await asyncio.sleep(seconds)
    await gateway.services.pauses.resume()
    texts = await asyncio.gather(*asking)
    assert texts == [f"{word} {number}" for number in range(4) for word in ("Hi", "Ho", "Ha")]
    assert sorted(call.reply["content"] for call in await calls_of(store)) == sorted(texts)
