"""Engines that fail while they are paused or get weights: said to who asked, and nothing else is lost by it."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from manege.cli.parts import upstream_engines
from manege.engine.base import Weights
from manege.engine.scripted import ScriptedEngine
from manege.engine.server import engine_app
from manege.errors import ConflictError, EngineError
from manege.gateway.server import Server
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from tests.conftest import TINY_MODEL
from tests.system.test_pause_restart import agent_of, serving, until

pytestmark = pytest.mark.anyio

FOLDER = Weights(kind="folder", folder="/weights")
RENDERER = renderer_for(open_folder(str(TINY_MODEL)))


class FailingEngine(ScriptedEngine):
    """Answers with a letter; raises when it is asked for what `fails` names."""

    def __init__(self, letter, *, fails="", token_delay_s=0.0):
        super().__init__(lambda _: RENDERER.encode(letter) * 8, token_delay_s=token_delay_s)
        self.fails = fails

    def _check(self, what):
        if self.fails == what:
            raise EngineError(f"no {what} today")

    async def pause(self, *, keep=False):
        self._check("pause")
        await super().pause(keep=keep)

    async def resume(self):
        self._check("resume")
        await super().resume()

    async def load(self, weights, version):
        self._check("load")
        await super().load(weights, version)


@asynccontextmanager
async def at_urls(*engines):
    """The same engines, by address, behind sockets."""
    async with AsyncExitStack() as stack:
        apps = [engine_app(engine, encode=RENDERER.encode, decode=RENDERER.decode) for engine in engines]
        servers = [await stack.enter_async_context(Server(app)) for app in apps]
        made = upstream_engines([server.url for server in servers])
        for engine in made.values():
            stack.push_async_callback(engine.close)
        yield made


async def said(agent):
    """The letters of an answer."""
    asked = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
    return "".join(sorted(set((await agent.chat.completions.create(**asked)).choices[0].message.content)))


async def agents_of(stack, server, client, names):
    return {name: await stack.enter_async_context(agent_of(server, client, name)) for name in names}


async def begin(agents):
    return {name: asyncio.create_task(said(agent)) for name, agent in agents.items()}


async def has_sampled(engine, number):
    async with asyncio.timeout(10):
        while (await engine.info()).stats["sampled"] < number:
            await asyncio.sleep(0.01)


async def versions(client, names):
    """Of the spans of each call of each rollout."""
    calls = await client.calls(names)
    return {name: [[span.version for span in call.spans] for call in calls[name]] for name in names}


async def test_a_pause_that_an_engine_refuses_fails_and_can_be_ended(tmp_path):
    good, bad = FailingEngine("x"), FailingEngine("y", fails="pause")
    async with (
        serving(tmp_path, {"good": good, "bad": bad}) as (server, client),
        agent_of(server, client) as agent,
    ):
        with pytest.raises(EngineError, match="the engine at bad failed: no pause today"):
            await client.pause(drain_s=0)
        assert (await client.state())["paused"]
        with pytest.raises(ConflictError, match="only while the gateway is paused"):
            await client.publish(FOLDER)
        assert [(await engine.info()).version for engine in (good, bad)] == [0, 0]
        asking = asyncio.create_task(said(agent))
        await until(lambda: server.services.gate.num_held)
        assert not (await client.resume())["paused"]
        assert await asking in "xy"
        assert not (await good.info()).paused
        # What was refused may work the next time.
        bad.fails = ""
        await client.pause(drain_s=0)
        assert await client.publish(FOLDER) == 1
        await client.resume()


async def test_a_pause_that_was_refused_can_be_asked_for_again_in_another_way(tmp_path):
    engine = FailingEngine("x", fails="pause")
    async with serving(tmp_path, engine) as (server, client):
        with pytest.raises(EngineError, match="no pause today"):
            await client.pause(drain_s=0, keep=True)
        engine.fails = ""
        assert (await client.pause(drain_s=0))["paused"]
        assert not server.services.gate.pause.keep
        assert await client.publish(FOLDER) == 1


async def test_weights_that_only_one_of_two_engines_loads_are_served_by_that_one(tmp_path):
    x, y = FailingEngine("x", token_delay_s=0.05), FailingEngine("y", fails="load", token_delay_s=0.05)
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(at_urls(x, y))
        # Rollouts have their homes by the names of engines: two at each by these, and four calls overload none.
        named = dict(zip(("good", "bad"), engines.values(), strict=True))
        server, client = await stack.enter_async_context(serving(tmp_path, named))
        agents = await agents_of(stack, server, client, names := [f"r{number}" for number in range(4)])
        cut = await begin(agents)
        await until(lambda: x.num_running + y.num_running == len(names))
        await asyncio.gather(*(has_sampled(engine, 2 * engine.num_running) for engine in (x, y)))
        await client.pause(drain_s=0)
        with pytest.raises(EngineError, match=list(engines)[1]):
            await client.publish(FOLDER)
        held = await begin(agents)
        await until(lambda: server.services.gate.num_held == len(names))
        await client.resume()
        homes = {name: await task for name, task in cut.items()}
        assert set(homes.values()) == {"x", "y"}
        assert {name: await task for name, task in held.items()} == homes
        known = await versions(client, names)
        for name, home in homes.items():
            new = 1 if home == "x" else 0
            assert sorted(known[name], key=len)[0] == [new]
            assert {version for spans in known[name] for version in spans} == {0, new}
        assert [(await engine.info()).version for engine in (x, y)] == [1, 0]

        y.fails = ""
        await client.pause(drain_s=10)
        assert await client.publish(FOLDER) == 2
        await client.resume()
        again = await begin(agents)
        assert {name: await task for name, task in again.items()} == homes
        assert all(calls[-1] == [2] for calls in (await versions(client, names)).values())


async def test_a_resume_that_one_of_two_engines_refuses_reaches_the_other(tmp_path):
    good, bad = FailingEngine("x"), FailingEngine("y", fails="resume")
    async with (
        serving(tmp_path, {"bad": bad, "good": good}) as (server, client),
        AsyncExitStack() as stack,
    ):
        agents = await agents_of(stack, server, client, [f"r{number}" for number in range(8)])
        await client.pause(drain_s=0)
        held = await begin(agents)
        await until(lambda: server.services.gate.num_held == len(agents))
        with pytest.raises(EngineError, match="the engine at bad failed: no resume today"):
            await client.resume()
        await until(lambda: sum(task.done() for task in held.values()) == len(agents) - bad.num_running)
        assert {task.result() for task in held.values() if task.done()} == {"x"}
        bad.fails = ""
        await client.resume()
        assert {await task for task in held.values()} == {"x", "y"}
