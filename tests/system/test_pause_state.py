"""What a gateway says of held calls and of its engines, which others set their pace by."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from manege.cli.parts import local_engine, upstream_engines
from manege.client import Client
from manege.config import EngineConfig, ModelConfig
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.errors import EngineError
from manege.gateway.engine_state import ANSWER_S, EVERY_S
from manege.gateway.flights import GRACE_S
from manege.gateway.hold import Gate, Pause
from manege.gateway.server import GatewayServer
from tests.chat_engine import chat_engine
from tests.conftest import OPERATOR_KEY, TINY_MODEL, gateway_app
from tests.system.test_gateway_pool import register, serving_engine
from tests.system.test_pause_restart import agent_of, ask, new_engine, until

pytestmark = pytest.mark.anyio

AUTH = {"authorization": f"Bearer {OPERATOR_KEY}"}


class Clock:
    """Real time, and what a test adds to it."""

    def __init__(self):
        self.added_s = 0.0

    def __call__(self):
        return time.time() + self.added_s


@asynccontextmanager
async def serving(store, engine, clock=time.time):
    """A gateway, its client, and an agent."""
    async with (
        GatewayServer(gateway_app(store, engine, clock=clock)) as server,
        Client(server.url, OPERATOR_KEY) as client,
        agent_of(server, client) as agent,
    ):
        yield server, client, agent


async def test_held_calls_are_counted_once_with_the_time_that_they_waited(store, engine):
    clock = Clock()
    async with serving(store, engine, clock) as (server, client, agent):
        gate = server.services.gate
        await ask(agent)
        state = await client.pause(drain_s=1)
        assert (state["held_total"], state["held_s"]) == (0, 0)
        asking = [asyncio.create_task(ask(agent, f"number {number}")) for number in range(3)]
        await until(lambda: gate.num_held == 3)
        clock.added_s += 100
        assert (await client.state())["held_s"] == pytest.approx(300, abs=15)
        # One of them leaves.
        asking.pop().cancel()
        await until(lambda: gate.num_held == 2)
        clock.added_s += 100
        state = await client.resume()
        assert (state["held_total"], state["held_s"]) == (3, pytest.approx(500, abs=15 + GRACE_S))
        await asyncio.gather(*asking)
        clock.added_s += 100
        assert (await client.state())["held_s"] == pytest.approx(state["held_s"], abs=5)
        async with httpx.AsyncClient(headers=AUTH, trust_env=False) as http:
            told = (await http.get(f"{server.url}/metrics")).text.splitlines()
        assert "manege_calls_held_total 3" in told
        assert "manege_calls_held 0" in told


async def test_a_call_that_waits_for_the_end_of_several_pauses_is_one(anyio_backend):
    gate, entered = Gate(time.time), asyncio.Event()

    async def call():
        async with gate.enter():
            entered.set()

    gate.hold(Pause(id="p", reason=None, since_s=0.0))
    calling = asyncio.create_task(call())
    for number in range(3):
        await asyncio.sleep(0)
        gate.release()
        gate.hold(Pause(id=str(number), reason=None, since_s=0.0))
    await asyncio.sleep(0)
    assert (gate.held_total, gate.num_held, entered.is_set()) == (1, 1, False)
    gate.release()
    await calling
    assert (gate.held_total, gate.num_held) == (1, 0)


async def test_an_engine_is_idle_while_it_has_no_call_and_the_gateway_is_not_paused(store):
    clock, engine = Clock(), new_engine()
    async with serving(store, engine, clock) as (_, client, agent):
        clock.added_s += 100
        assert (await client.state())["engine"]["idle_s"] == pytest.approx(100, abs=15)
        await engine.pause()
        asking = asyncio.create_task(ask(agent))
        await until(lambda: engine.num_running)
        clock.added_s += 1000
        await engine.resume()
        await asking
        await client.pause(drain_s=1)
        clock.added_s += 1000
        await client.resume()
        clock.added_s += 100
        assert (await client.state())["engine"]["idle_s"] == pytest.approx(200, abs=30)


async def test_a_local_engine_under_load_says_what_runs_and_what_waits(store):
    model, config = ModelConfig(path=str(TINY_MODEL)), EngineConfig(max_batch=2, threads=1)
    _, engine = await asyncio.to_thread(local_engine, model, config, seed=0)
    async with serving(store, engine) as (_, client, agent):
        is_seen = asyncio.Event()

        async def work():
            while not is_seen.is_set():
                await ask(agent, "one after the other")

        asking = [asyncio.create_task(work()) for _ in range(8)]
        async with asyncio.timeout(30):
            while (state := (await client.state())["engine"])["running"] < 2 or not state["waiting"]:
                await asyncio.sleep(0.2)
        is_seen.set()
        assert (state["running"], 1 <= state["waiting"] <= 6, 0 < state["cache_usage"] <= 1) == (2, True, True)
        assert state["inflight"] == ["abort_continue", "drain", "keep"]
        assert state["weights"] == ["folder", "shared"]
        await asyncio.gather(*asking)
    await engine.close()


async def test_the_state_of_two_engine_servers_is_that_of_both_and_of_one_when_the_other_is_gone(store):
    async with AsyncExitStack() as stack:
        x, x_url = await stack.enter_async_context(serving_engine("x"))
        async with serving_engine("y") as (y, y_url), AsyncExitStack() as asking:
            engines = upstream_engines([x_url, y_url])
            for engine in engines.values():
                stack.push_async_callback(engine.close)
            server, client, _ = await stack.enter_async_context(serving(store, engines))
            for engine in (x, y):
                await engine.pause()
            names = [f"r{number}" for number in range(8)]
            agents = [await asking.enter_async_context(agent_of(server, client, name)) for name in names]
            calls = [asyncio.create_task(ask(agent)) for agent in agents]
            await until(lambda: x.num_running and y.num_running and x.num_running + y.num_running == 8)
            async with asyncio.timeout(10):
                while (state := (await client.state())["engine"])["running"] < 8:
                    await asyncio.sleep(0.1)
            assert (state["running"], state["weights"], "drain" in state["inflight"]) == (8, ["folder"], True)
            for engine in (x, y):
                await engine.resume()
            await asyncio.gather(*calls)
        async with asyncio.timeout(10):
            while (state := (await client.state())["engine"])["running"]:
                await asyncio.sleep(0.1)
        assert (state["weights"], state["waiting"]) == (["folder"], 0)


class AskedEngine(ScriptedEngine):
    """Counts how often it is asked how it is; says so at once, later, or not at all."""

    def __init__(self):
        super().__init__(hashed_reply(num_tokens=4, first_id=97, last_id=122))
        self.num_asked = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.fails = False

    async def info(self):
        self.num_asked += 1
        await self.answers.wait()
        if self.fails:
            raise EngineError("the engine is away")
        return await super().info()


async def test_engines_are_asked_once_a_second_however_many_want_to_know(store):
    engine = AskedEngine()
    async with serving(store, engine) as (_, client, _):
        begun_s = time.monotonic()
        states = await asyncio.gather(*(client.state() for _ in range(50)))
        assert engine.num_asked <= 1 + (time.monotonic() - begun_s)
        assert {state["engine"]["running"] for state in states} == {0}
        # One that hangs is not asked again before it has answered, and holds nobody up for long.
        engine.answers.clear()
        await asyncio.sleep(EVERY_S)
        num_asked, begun_s = engine.num_asked, time.monotonic()
        await asyncio.gather(*(client.state() for _ in range(20)))
        await asyncio.sleep(EVERY_S)
        await client.state()
        assert engine.num_asked == num_asked + 1
        assert time.monotonic() - begun_s < 2 * ANSWER_S + EVERY_S + 3


async def test_an_engine_that_does_not_say_how_it_is_is_left_out(store):
    good, bad = AskedEngine(), AskedEngine()
    bad.fails = True
    async with serving(store, {"good": good, "bad": bad}) as (_, client, agent):
        await good.pause()
        await bad.pause()
        asking = [asyncio.create_task(ask(agent, f"number {number}")) for number in range(8)]
        await until(lambda: good.num_running + bad.num_running == 8)
        await asyncio.sleep(1)
        assert (await client.state())["engine"]["running"] == good.num_running
        await good.resume()
        await bad.resume()
        await asyncio.gather(*asking)


async def test_engines_that_take_messages_can_only_be_waited_for(store):
    async with serving(store, None) as (server, client, _), chat_engine() as (_, url):
        state = (await client.state())["engine"]
        assert (state["inflight"], state["weights"], state["idle_s"]) == ([], [], 0)
        async with httpx.AsyncClient(base_url=server.url, headers=AUTH, trust_env=False, timeout=60) as http:
            assert (await register(http, url, mode="messages")).status_code == 201
        state = (await client.state())["engine"]
        assert (state["inflight"], state["weights"]) == (["drain"], [])
