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
from tests.system.test_pause_failures import at_urls
from tests.system.test_pause_restart import agent_of, serving, until

pytestmark = pytest.mark.anyio

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
    """Makes engines that answer by the script, and go on with it where a prompt has a part of it already."""
    num_prompt = {}

    def reply(prompt_ids):
        (number,) = map(int, re.findall(r"number (\d+)", renderer.decode(prompt_ids)))
        given = len(prompt_ids) - num_prompt.setdefault(number, len(prompt_ids))
        return renderer.encode(script(number))[given:]

    return lambda **options: ScriptedEngine(reply, chunk_size=4, **options)


async def ask(agent, number):
    """The id and the text of an answer; every other one is streamed."""
    asked = {"model": "any", "messages": [{"role": "user", "content": f"number {number}"}]}
    if number % 2:
        answer = await agent.chat.completions.create(**asked)
        return answer.id, answer.choices[0].message.content
    chunks = [chunk async for chunk in await agent.chat.completions.create(**asked, stream=True)]
    (name,) = {chunk.id for chunk in chunks}
    return name, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def sampled(engines):
    return sum([(await engine.info()).stats["sampled"] for engine in engines])


async def live_through(served, engines, weights, *, num_calls, num_pauses):
    """So many calls at a time, over so many pauses with weights in every other one: the answers, by number."""
    server, client = served
    answers, is_over = {}, asyncio.Event()
    async with AsyncExitStack() as stack:
        agents = [await stack.enter_async_context(agent_of(server, client, name)) for name in NAMES]

        async def work(number):
            while not is_over.is_set():
                answers[number] = await ask(agents[number % len(agents)], number)
                number += num_calls

        working = [asyncio.create_task(work(number)) for number in range(num_calls)]
        await until(lambda: sum(engine.num_running for engine in engines) == num_calls)
        async with asyncio.timeout(60):
            for cycle in range(num_pauses):
                await client.pause(drain_s=(0, 0.01)[cycle % 2], keep=cycle % 3 == 0)
                if cycle % 2:
                    assert await client.publish(weights) == cycle // 2 + 1
                before = await sampled(engines)
                await client.resume()
                while await sampled(engines) == before:
                    await asyncio.sleep(0.002)
            is_over.set()
            await asyncio.gather(*working)
    return answers


async def check(client, renderer, answers, num_calls):
    """Each call is answered once and stored once, whole, by versions that never fall."""
    assert {number: text for number, (_, text) in answers.items()} == {each: script(each) for each in answers}
    calls = [call for calls in (await client.calls(NAMES)).values() for call in calls]
    by_name = {f"chatcmpl-{call.id}": call for call in calls}
    assert (len(calls), by_name.keys()) == (len(answers), {name for name, _ in answers.values()})
    for number, (name, _) in answers.items():
        assert by_name[name].response_ids_R.tolist() == renderer.encode(script(number))
        versions = [span.version for span in by_name[name].spans]
        assert versions == sorted(versions)
    assert sum(len(call.spans) > 2 for call in calls) > num_calls
    state = await client.state()
    assert (state["inflight"], state["held"]) == (0, 0)
    assert 0 < state["held_total"] <= len(answers)


@pytest.mark.timeout(120)
async def test_two_hundred_calls_at_a_time_live_through_a_hundred_pauses(tmp_path, answering, renderer):
    engine = answering(token_delay_s=0.08)
    async with serving(tmp_path, engine) as served:
        answers = await live_through(served, [engine], Weights(kind="shared"), num_calls=200, num_pauses=100)
        await check(served[1], renderer, answers, 200)


@pytest.mark.timeout(120)
async def test_calls_of_engines_elsewhere_that_are_cut_and_continued_live_through_pauses(tmp_path, answering, renderer):
    engines, weights = [answering(token_delay_s=0.03) for _ in range(2)], Weights(kind="folder", folder="/weights")
    async with at_urls(*engines) as upstream, serving(tmp_path, upstream) as served:
        answers = await live_through(served, engines, weights, num_calls=40, num_pauses=40)
        await check(served[1], renderer, answers, 40)


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
