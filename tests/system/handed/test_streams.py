"""Answers come as they are made, and nobody waits for one that nobody wants."""

import asyncio

import httpx
import pytest

from manege.types import Delivered
from tests.system.agents.asking import ask, until, user
from tests.system.handed.agents import WORDS, count, openai_at, slow

pytestmark = pytest.mark.anyio


@slow
async def test_a_stream_begins_while_the_engine_still_samples(url, engine, store):
    async with openai_at(url) as agent:
        stream = await ask(agent, [user("hi")], stream=True)
        first = await anext(chunk async for chunk in stream if chunk.choices[0].delta.content)
        assert engine.num_running == 1
        rest = [chunk.choices[0] async for chunk in stream]
    text = first.choices[0].delta.content + "".join(choice.delta.content or "" for choice in rest)
    assert (text, rest[-1].finish_reason) == (WORDS, "stop")
    assert await count(store, "r1") == 1


@slow
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_an_agent_that_goes_away_ends_its_call_at_the_engine(url, engine, store, is_stream):
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        body = {"model": "m", "messages": [user("hi")], "stream": is_stream}
        call = asyncio.create_task(http.post("/v1/chat/completions", json=body))

        async def runs():
            return engine.num_running == 1

        async def is_noted():
            (noted,) = (await store.calls(["r1"]))["r1"] or [None]
            return noted and noted.delivered is Delivered.NO

        await until(runs)
        call.cancel()
    await until(is_noted)
    assert engine.num_running == 0
