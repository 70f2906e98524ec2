"""An update through a real gateway: whatever fails in it, calls go on under weights that their spans name."""

import asyncio

import httpx
import pytest

from manege.client import Client
from manege.config import CreditConfig, TrainConfig
from manege.engine.base import EngineCapabilities, Weights
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.errors import EngineError, TrainerError
from manege.gateway.server import GatewayServer
from manege.trainer.engines.base import StepReport, VersionGap
from manege.trainer.objective import objective_of
from manege.trainer.update import Updates
from manege.types import RolloutSpec, Task
from tests.conftest import OPERATOR_KEY, gateway_app

pytestmark = pytest.mark.anyio

REPLY = hashed_reply(num_tokens=4, first_id=97, last_id=122)
BATCH = [[object()]]
"""A mini-batch; the train engine of these tests does not look into it."""


class Steps:
    """A train engine that only says when it is asked."""

    def __init__(self, *, fails=False, publishes="shared"):
        self.fails, self.log = fails, []
        self.capabilities = type("Capabilities", (), {"publishes": publishes})
        self.weights = Weights(kind=publishes, folder=None if publishes == "shared" else "/weights")

    def step(self, _batch, _objective):
        self.log.append("step")
        if self.fails:
            raise TrainerError("loss nan is not finite; weights are unchanged")
        gap = VersionGap(tokens=1, total=0.0, largest=0.0, kl=0.0)
        return StepReport(metrics={"loss": 1.0}, gap_by_version={0: gap})

    def publish(self):
        self.log.append("publish")
        return self.weights


class Engine(ScriptedEngine):
    """One that fails where it is told to."""

    fails_at, kept = None, ()

    async def pause(self, *, keep=False):
        self.kept = (*self.kept, keep)
        if self.fails_at in ("pause", "pause and resume"):
            raise EngineError("the engine could not abort its requests")
        await super().pause(keep=keep)

    async def resume(self):
        if self.fails_at == "pause and resume":
            raise EngineError("the engine is gone")
        await super().resume()

    async def load(self, weights, version):
        if self.fails_at == "load":
            raise EngineError("the engine could not read the weights")
        await super().load(weights, version)


@pytest.fixture
async def engine():
    made = Engine(REPLY)
    yield made
    await made.close()


async def threaded(function, *arguments):
    return await asyncio.to_thread(function, *arguments)


def updates_of(client, engine, **train):
    objective = objective_of(CreditConfig())
    return Updates(client, engine, TrainConfig(**train), objective, threaded, asyncio.get_running_loop().time)


async def nothing():
    """Nothing to do while calls are held."""


class Agent:
    """Makes one call of a rollout after the other."""

    def __init__(self, client):
        self.client, self.http = client, httpx.AsyncClient(base_url=client.url, timeout=30)

    async def begin(self):
        await self.client.create_rollouts([RolloutSpec(id="r", run="run", task=Task(id="t", input={}))])
        [claim] = await self.client.claim(controller="c", limit=1, lease_s=60)
        self.key = {"authorization": f"Bearer {claim.agent_key}"}
        return self

    async def call(self, text="hello"):
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        answer = await self.http.post("/v1/chat/completions", json=body, headers=self.key)
        assert answer.status_code == 200, answer.text

    async def versions(self):
        calls = await self.client.calls(["r"])
        return [span.version for call in calls["r"] for span in call.spans]


@pytest.fixture
async def agent(client):
    made = await Agent(client).begin()
    yield made
    await made.http.aclose()


async def test_calls_are_held_for_the_step_and_go_on_under_the_new_version(client, agent):
    trained = Steps()
    updates = updates_of(client, trained)
    await updates.begin()
    await agent.call()
    held = []

    async def while_held():
        assert (await client.state())["paused"]
        assert trained.log == []
        held.append(asyncio.create_task(agent.call("while held")))
        while not (await client.state())["held"]:
            await asyncio.sleep(0.01)

    update = await updates.run(BATCH, 0, while_held)
    await held[0]
    assert (update.version, trained.log) == (1, ["step", "publish"])
    assert await agent.versions() == [0, 1]
    assert (update.metrics["held_calls"], update.metrics["unsettled_calls"]) == (1, 0)
    assert update.metrics["held_s"] > 0
    assert set(update.metrics["gap_by_distance"]) == {"0"}
    again = await updates.run(BATCH, 1, nothing)
    assert again.metrics["held_calls"] == 0
    assert again.metrics["held_s"] < update.metrics["held_s"], "no second is counted twice"


@pytest.mark.parametrize("fails", ["pause", "step", "load"])
async def test_after_an_update_that_fails_the_old_weights_serve_on(client, engine, agent, fails):
    trained = Steps(fails=fails == "step")
    updates = updates_of(client, trained)
    await updates.begin()
    engine.fails_at = fails
    with pytest.raises((TrainerError, EngineError), match=r"finite|abort|read the weights"):
        await updates.run(BATCH, 0, nothing)
    assert trained.log == {"pause": [], "step": ["step"], "load": ["step", "publish"]}[fails]
    assert not (await client.state())["paused"]
    await agent.call()
    assert await agent.versions() == [0]
    engine.fails_at = None
    trained.fails = False
    update = await updates.run(BATCH, 0, nothing)
    await agent.call("again")
    assert await agent.versions() == [0, update.version]


async def test_the_first_cause_is_told_where_the_engine_cannot_be_resumed_either(client, engine, caplog):
    updates = updates_of(client, Steps())
    await updates.begin()
    engine.fails_at = "pause and resume"
    with pytest.raises(EngineError):
        await updates.run(BATCH, 0, nothing)
    assert "could not abort its requests" in caplog.text
    engine.fails_at = None
    await client.resume()


@pytest.mark.parametrize(("inflight", "kept"), [("drain", False), ("abort_continue", False), ("keep", True)])
async def test_the_engine_keeps_its_caches_if_the_run_says_so(client, engine, inflight, kept):
    updates = updates_of(client, Steps(), inflight=inflight)
    await updates.begin()
    await updates.run(BATCH, 0, nothing)
    assert engine.kept == (kept,)


async def test_a_cancelled_update_resumes_the_gateway(client, agent):
    updates = updates_of(client, Steps())
    await updates.begin()
    reached = asyncio.Event()

    async def while_held():
        reached.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(updates.run(BATCH, 0, while_held))
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not (await client.state())["paused"]
    await agent.call()


async def test_an_engine_apart_serves_on_during_the_step(client, agent):
    loop = asyncio.get_running_loop()

    class Apart(Steps):
        def step(self, batch, objective):
            asyncio.run_coroutine_threadsafe(agent.call("during the step"), loop).result(timeout=20)
            return super().step(batch, objective)

    updates = updates_of(client, trained := Apart(publishes="folder"))
    await updates.begin()
    update = await updates.run(BATCH, 0, nothing)
    await agent.call("after it")
    assert await agent.versions() == [0, update.version]
    assert trained.log == ["step", "publish"]


async def test_long_answers_are_waited_for_as_long_as_the_run_says_and_then_go_on(store):
    slow = Engine(hashed_reply(num_tokens=40, first_id=97, last_id=122), token_delay_s=0.1)
    async with GatewayServer(gateway_app(store, slow)) as server, Client(server.url, OPERATOR_KEY) as client:
        agent = await Agent(client).begin()
        for inflight, drain_s, least_s, most_s in (("drain", 0.5, 0.5, 2.5), ("abort_continue", 10, 0, 1.5)):
            train = {"inflight": inflight} | ({"drain_s": drain_s} if inflight == "drain" else {})
            updates = updates_of(client, Steps(), **train)
            await updates.begin()
            body = {"model": "tiny", "messages": [{"role": "user", "content": inflight}], "max_tokens": 40}
            call = asyncio.create_task(agent.http.post("/v1/chat/completions", json=body, headers=agent.key))
            sampled = (await slow.info()).stats["sampled"]
            while (await slow.info()).stats["sampled"] < sampled + 2:
                await asyncio.sleep(0.01)
            version = (await client.state())["version"]
            update = await updates.run(BATCH, version, nothing)
            assert least_s <= update.metrics["drain_s"] <= most_s
            assert update.metrics["unsettled_calls"] == 1
            assert (await call).status_code == 200
            [spans] = [each.spans for each in (await client.calls(["r"]))["r"][-1:]]
            assert [span.version for span in spans] == [version, update.version]
        await agent.http.aclose()


class Limited(Engine):
    capabilities = EngineCapabilities(inflight=frozenset({"drain"}), weights=frozenset({"folder"}))


@pytest.mark.parametrize(
    ("publishes", "train", "message"),
    [
        ("folder", {"inflight": "keep"}, r"train.inflight = 'keep': the gateway's engines can do 'drain'"),
        ("shared", {}, r"take 'folder' weights, and this train engine gives 'shared'"),
    ],
)
async def test_what_the_gateways_engines_cannot_do_is_refused_before_anything_begins(store, publishes, train, message):
    async with (
        GatewayServer(gateway_app(store, Limited(REPLY))) as server,
        Client(server.url, OPERATOR_KEY) as client,
    ):
        with pytest.raises(TrainerError, match=message):
            await updates_of(client, Steps(publishes=publishes), **train).begin()
