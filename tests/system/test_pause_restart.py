"""A pause outlives the gateway that was asked for it, and the engine that it held; a trainer can go on with it."""

import asyncio
import os
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from manege.client import Client
from manege.engine.base import Weights
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.errors import ConflictError
from manege.gateway.server import GatewayServer
from manege.store.sql import SqlStore
from manege.types import RolloutSpec, Task
from tests.conftest import OPERATOR_KEY, gateway_app
from tests.system.test_parts_alone import TINY
from tests.system.test_training import RUN_FILE, finish, manege

pytestmark = pytest.mark.anyio


def new_engine(**options):
    return ScriptedEngine(hashed_reply(num_tokens=4, first_id=97, last_id=122), **options)


@asynccontextmanager
async def serving(folder, engine):
    """A gateway on a database, its client, and the store."""
    store = await SqlStore.open(folder / "store.db")
    async with GatewayServer(gateway_app(store, engine)) as server, Client(server.url, OPERATOR_KEY) as client:
        yield server, client
    await store.close()


@asynccontextmanager
async def agent_of(server, client, name="r"):
    """The official client with the key of a rollout that runs."""
    await client.create_rollouts([RolloutSpec(id=name, run="run", task=Task(id="t", input={}))])
    claims = await client.claim(controller="c", limit=1, lease_s=60)
    key = claims[0].agent_key if claims else server.services.auth.agent_key(name, 0)
    transport = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, http_client=transport
    ) as agent:
        yield agent


def ask(agent, text="hi"):
    return agent.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


class NotedEngine(ScriptedEngine):
    """Notes how it was paused."""

    def __init__(self):
        super().__init__(hashed_reply(num_tokens=4, first_id=97, last_id=122))
        self.kept = []

    async def pause(self, *, keep=False):
        self.kept.append(keep)
        await super().pause(keep=keep)


@pytest.mark.parametrize("keep", [False, True])
async def test_a_gateway_that_restarts_pauses_its_engine_again_as_it_was_paused(tmp_path, keep):
    for engine in (first := NotedEngine(), second := NotedEngine()):
        async with serving(tmp_path, engine) as (_, client):
            if engine is first:
                await client.pause(drain_s=0, keep=keep)
            assert engine.kept == [keep]
    async with serving(tmp_path, second) as (_, client):
        # One that lasts goes on as it is.
        assert (await client.pause(drain_s=0, keep=not keep))["paused"]
        assert second.kept == [keep] * 2
        assert not (await client.resume())["paused"]


@pytest.mark.parametrize("is_lost", [False, True], ids=["the engine lives on", "the engine is lost with it"])
async def test_a_gateway_that_restarts_while_paused_holds_calls_and_its_engine(tmp_path, is_lost):
    engine = new_engine()
    async with serving(tmp_path, engine) as (_, client):
        await client.pause(drain_s=1)
    engine = new_engine() if is_lost else engine
    async with serving(tmp_path, engine) as (server, client), agent_of(server, client) as agent:
        state = await client.state()
        assert (state["paused"], (await engine.info()).paused) == (True, True)
        assert state["oldest"]["pause"] >= 0
        asking = asyncio.create_task(ask(agent))
        await until(lambda: server.services.gate.num_held)
        # What the trainer that paused goes on with.
        await client.pause(drain_s=1)
        assert await client.publish(Weights(kind="shared")) == 1
        await client.resume()
        assert (await asking).choices[0].message.content
        (call,) = (await client.calls(["r"]))["r"]
        assert [span.version for span in call.spans] == [1]
    async with serving(tmp_path, engine) as (_, client):
        assert not (await client.state())["paused"]


async def test_a_pause_that_only_holds_is_no_pause_of_the_engine_after_a_restart_either(tmp_path):
    engine = new_engine()
    async with serving(tmp_path, engine) as (server, _):
        await server.services.pauses.pause(None, "an update")
    async with serving(tmp_path, engine) as (_, client):
        state = await client.state()
        assert (state["paused"], state["reason"], (await engine.info()).paused) == (True, "an update", False)
        with pytest.raises(ConflictError, match="only while the gateway is paused"):
            await client.publish(Weights(kind="shared"))
        await client.resume()


async def test_calls_that_wait_live_through_many_pauses(tmp_path):
    """Each is answered once, whatever weights changed under it."""
    engine = new_engine(token_delay_s=0.01)
    async with serving(tmp_path, engine) as (server, client), agent_of(server, client) as agent:
        asking = [asyncio.create_task(ask(agent, f"number {number}")) for number in range(60)]
        for _ in range(20):
            await client.pause(drain_s=0.01)
            await client.publish(Weights(kind="shared"))
            await client.resume()
            await asyncio.sleep(0.01)
        answers = {answer.id.removeprefix("chatcmpl-") for answer in await asyncio.gather(*asking)}
        calls = (await client.calls(["r"]))["r"]
        assert ({call.id for call in calls}, len(calls)) == (answers, 60)
        versions = [span.version for call in calls for span in call.spans]
        assert set(versions) <= set(range(21))
        assert all(call.spans == sorted(call.spans, key=lambda span: span.version) for call in calls)


async def test_a_trainer_that_died_in_this_process_leaves_no_pause(tmp_path):
    store = await SqlStore.open(tmp_path / "other.db")
    pause = {"id": "p", "reason": None, "since_s": 0.0, "engine_paused": True, "version": None}
    await store.set_value("pause", pause)
    await store.close()
    words = ["eval", RUN_FILE, f"gateway.store={tmp_path / 'other.db'}", "tasks.num_heldout=2", "--unsafe"]
    code, _, err = await asyncio.to_thread(finish, manege(*words, env={**os.environ, "PYTHONPATH": str(TINY)}), 60)
    assert code == 0, err
