"""Many pauses under many calls, and one under a very long call: nothing is lost, nothing waits for ever."""

import asyncio
import re
import time
from contextlib import AsyncExitStack

import pytest

from manege.engine.base import Weights
from manege.engine.scripted import ScriptedEngine
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from manege.types import Delivered
from tests.conftest import TINY_MODEL
from tests.system.test_pause_restart import agent_of, serving, until

pytestmark = pytest.mark.anyio

NUM_CALLS, NUM_PAUSES = 200, 100
NAMES = [f"r{number}" for number in range(8)]
"""Of rollouts, each with a client of its own."""
LONG = 500
"""Tokens of the long answer, of 1.2 s each: ten minutes."""


def script(number):
    """What call `number` is answered: all differ."""
    return f"call {number} says " + "x y " * (number % 9)


@pytest.fixture(scope="module")
def renderer():
    return renderer_for(open_folder(str(TINY_MODEL)))


@pytest.fixture
def answering(renderer):
    """Makes engines that answer by the script."""

    def reply(prompt_ids):
        (number,) = re.findall(r"number (\d+)", renderer.decode(prompt_ids))
        return renderer.encode(script(int(number)))

    return lambda **options: ScriptedEngine(reply, **options)


async def ask(agent, number):
    """The id and the text of an answer; every other one is streamed."""
    asked = {"model": "any", "messages": [{"role": "user", "content": f"number {number}"}]}
    if number % 2:
        answer = await agent.chat.completions.create(**asked)
        return answer.id, answer.choices[0].message.content
    chunks = [chunk async for chunk in await agent.chat.completions.create(**asked, stream=True)]
    (name,) = {chunk.id for chunk in chunks}
    return name, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def sampled(engine):
    return (await engine.info()).stats["sampled"]


@pytest.mark.timeout(120)
async def test_two_hundred_calls_at_a_time_live_through_a_hundred_pauses(tmp_path, answering, renderer):
    engine, answers, is_over = answering(token_delay_s=0.08, chunk_size=4), {}, asyncio.Event()
    async with AsyncExitStack() as stack:
        server, client = await stack.enter_async_context(serving(tmp_path, engine))
        agents = [await stack.enter_async_context(agent_of(server, client, name)) for name in NAMES]

        async def work(number):
            while not is_over.is_set():
                answers[number] = await ask(agents[number % len(agents)], number)
                number += NUM_CALLS

        working = [asyncio.create_task(work(number)) for number in range(NUM_CALLS)]
        await until(lambda: engine.num_running == NUM_CALLS)
        async with asyncio.timeout(60):
            for cycle in range(NUM_PAUSES):
                await client.pause(drain_s=(0, 0.01)[cycle % 2], keep=cycle % 3 == 0)
                if cycle % 2:
                    assert await client.publish(Weights(kind="shared")) == cycle // 2 + 1
                before = await sampled(engine)
                await client.resume()
                while await sampled(engine) == before:
                    await asyncio.sleep(0.002)
            is_over.set()
            await asyncio.gather(*working)
        assert {number: text for number, (_, text) in answers.items()} == {each: script(each) for each in answers}
        calls = [call for calls in (await client.calls(NAMES)).values() for call in calls]
        by_name = {f"chatcmpl-{call.id}": call for call in calls}
        assert (len(calls), by_name.keys()) == (len(answers), {name for name, _ in answers.values()})
        for number, (name, _) in answers.items():
            assert by_name[name].response_ids_R.tolist() == renderer.encode(script(number))
            versions = [span.version for span in by_name[name].spans]
            assert versions == sorted(versions)
        assert sum(len(call.spans) > 2 for call in calls) > NUM_CALLS
        state = await client.state()
        assert (state["inflight"], state["held"]) == (0, 0)
        assert 0 < state["held_total"] <= len(answers)


async def test_an_answer_of_ten_minutes_does_not_hold_a_pause_up_and_goes_on_after_it(tmp_path, renderer):
    engine = ScriptedEngine(lambda _: renderer.encode("x") * LONG, token_delay_s=1.2)
    async with serving(tmp_path, engine) as (server, client), agent_of(server, client) as agent:
        asked = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
        async with await agent.chat.completions.create(**asked, stream=True) as chunks:
            await read_token(chunks)
            begun_s = time.monotonic()
            state = await client.pause(drain_s=1)
            assert 1 <= time.monotonic() - begun_s < 4
            assert (state["paused"], state["inflight"]) == (True, 1)
            await client.publish(Weights(kind="shared"))
            await client.resume()
            for _ in range(2):
                await read_token(chunks)
        await until(lambda: not engine.num_running)
        call = await stored(client)
        assert ([span.version for span in call.spans], call.delivered) == ([0, 1], Delivered.NO)
        assert len(call.response_ids_R) < LONG


async def read_token(chunks):
    async for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            return
    raise AssertionError("the answer has ended")


async def stored(client):
    """The call, once its client's leaving was noted."""
    async with asyncio.timeout(10):
        while not (calls := (await client.calls(["r"]))["r"]) or calls[0].delivered is Delivered.UNKNOWN:
            await asyncio.sleep(0.05)
    (call,) = calls
    return call
