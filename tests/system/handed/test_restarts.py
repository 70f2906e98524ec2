"""A gateway that restarts is no more than a delay."""

import asyncio
import signal

import pytest

from manege.client import Client
from tests.conftest import OPERATOR_KEY
from tests.system.agents.asking import ask, until, user
from tests.system.handed.agents import WAYS, WORDS, claimed, openai_at, sandbox, slow

pytestmark = pytest.mark.anyio


async def restart(process):
    process.start()
    await asyncio.to_thread(process.wait_until_ready)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_between_two_calls_a_gateway_that_restarts_is_but_a_delay(process, way, number, caplog):
    caplog.set_level("INFO", "manege.controller")
    gateway, gateway_url = process
    async with Client(gateway_url, OPERATOR_KEY) as client:
        (claim,) = await claimed(client, "r1")
        async with sandbox(client, claim, way) as url, openai_at(url, max_retries=0) as agent:
            await ask(agent, [user("hi")])
            await asyncio.to_thread(gateway.kill, number)
            call = asyncio.create_task(ask(agent, [user("hi again")]))
            await restart(gateway)
            assert (await call).choices[0].message.content == "word "
        assert len((await client.calls(["r1"]))["r1"]) == 2
    assert "relayed" not in caplog.text


async def test_a_call_that_is_held_survives_the_gateways_death_by_one_retry(process):
    gateway, gateway_url = process
    async with Client(gateway_url, OPERATOR_KEY) as client:
        (claim,) = await claimed(client, "r1")
        async with sandbox(client, claim) as url, openai_at(url, max_retries=1) as agent:
            await client.pause(drain_s=0)
            call = asyncio.create_task(ask(agent, [user("hi")]))

            async def is_held():
                return (await client.state())["held"] == 1

            await until(is_held)
            await asyncio.to_thread(gateway.kill, signal.SIGKILL)
            await restart(gateway)
            await until(is_held, timeout_s=30)
            await client.resume()
            assert (await call).choices[0].message.content == "word "
        assert len((await client.calls(["r1"]))["r1"]) == 1


@slow
async def test_a_gateway_that_is_stopped_lets_the_answer_under_way_go_out(process, engine):
    gateway, gateway_url = process
    async with Client(gateway_url, OPERATOR_KEY) as client:
        (claim,) = await claimed(client, "r1")
        async with sandbox(client, claim) as url, openai_at(url, max_retries=0) as agent:
            call = asyncio.create_task(ask(agent, [user("hi")]))

            async def runs():
                return engine.num_running == 1

            await until(runs)
            await asyncio.to_thread(gateway.kill, signal.SIGTERM)
            assert (await call).choices[0].message.content == WORDS
