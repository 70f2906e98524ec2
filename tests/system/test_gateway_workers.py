"""A gateway of two processes behind one port: to agents, controllers, trainers and scrapers it is one."""

import asyncio
import os
import re
import signal
import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from manege.client import Client
from manege.engine.base import Weights
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.server import engine_app
from manege.gateway.presence import BEAT_S
from manege.gateway.server import Server
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from manege.store.base import Ending
from manege.store.reading import StoreReader
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.types import Outcome
from tests import postgres
from tests.conftest import OPERATOR_KEY, TINY_MODEL
from tests.system.agents.asking import ask, until, user
from tests.system.handed.agents import claimed, openai_at, sandbox
from tests.system.kill.processes import Part, children
from tests.system.test_training import finish, manege

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

AUTH = {"authorization": f"Bearer {OPERATOR_KEY}"}


class Gateway:
    """Of two workers, without an engine until one is registered."""

    def __init__(self, database, folder):
        self.database = database
        words = ["gateway", "--model", TINY_MODEL, "--engine", "none", "--port", 0, "--folder", folder / "data"]
        words += ["--operator-key", OPERATOR_KEY, "--store", database, "--workers", 2]
        self.part = Part(words, folder / "log.txt", ready="2 workers")

    def start(self):
        self.part.start()
        self.part.wait_until_ready()
        self.url = re.findall("gateway (http[^,]+),", self.part.log.read_text())[-1]

    @property
    def workers(self):
        """Their pids, the oldest first."""
        return [pid for pid, _ in sorted(children().get(self.part.pid, ()), key=lambda child: child[1])]

    async def signs(self):
        """What each worker said last, by its index."""
        reader = await StoreReader.open(self.database)
        try:
            return {int(each.id.rpartition("-")[2]): each.state for each in await reader.gateways()}
        finally:
            await reader.close()

    async def kill(self, worker):
        """Returns when it was."""
        killed_s = time.time()
        os.kill(worker, signal.SIGKILL)
        await until(lambda: are_gone([worker]))
        return killed_s

    async def restored(self, killed):
        """Until another worker has taken its place, and has said so."""

        async def has_other():
            log = self.part.log.read_text()
            return len(self.workers) == 2 and killed not in self.workers and log.count("is started again") > 0

        since_s = time.time()
        await until(has_other, timeout_s=30)

        async def have_signed():
            reader = await StoreReader.open(self.database)
            try:
                return sum(each.seen_s > since_s for each in await reader.gateways()) == 2
            finally:
                await reader.close()

        await until(have_signed, timeout_s=30)

    async def both_say(self, **numbers):
        """Until they do, at their next beat."""

        async def say():
            signs = await self.signs()
            return len(signs) == 2 and all(
                state[name] == number for state in signs.values() for name, number in numbers.items()
            )

        await until(say, timeout_s=20)


@contextmanager
def gateway_over(database, folder):
    gateway = Gateway(database, folder)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.part.end()


@pytest.fixture(scope="module")
def gateway(postgres_server, tmp_path_factory):
    with (
        postgres.schema(postgres_server) as database,
        gateway_over(database, tmp_path_factory.mktemp("gateway")) as made,
    ):
        yield made


@pytest.fixture
async def client(gateway):
    async with Client(gateway.url, OPERATOR_KEY) as opened:
        yield opened
        await opened.resume()


@asynccontextmanager
async def engine_for(gateway, **options):
    """An engine that says four letters, which hang on the prompt, registered at whichever worker."""
    renderer = renderer_for(open_folder(str(TINY_MODEL)))
    engine = ScriptedEngine(hashed_reply(num_tokens=4, first_id=64, last_id=89), **options)
    async with Server(engine_app(engine, encode=renderer.encode, decode=renderer.decode)) as server:
        async with http_to(gateway) as http:
            models = [{"model": "m", "endpoint": server.url, "mode": "tokens"}]
            (await http.post("/api/models", json=models)).raise_for_status()
        yield engine
    await engine.close()


@asynccontextmanager
async def engine_at(gateway, **options):
    """The same, and forgotten in the end."""
    async with engine_for(gateway, **options) as engine:
        yield engine
        async with http_to(gateway) as http:
            (await http.delete("/api/models")).raise_for_status()


def http_to(gateway):
    """By a connection of its own."""
    return httpx.AsyncClient(base_url=gateway.url, headers=AUTH, trust_env=False, timeout=30)


async def agents_of(stack, client, gateway, *names):
    """Agents with a connection each, in the order of their names."""
    keys = [claim.agent_key for claim in await claimed(client, *names)]
    return [await stack.enter_async_context(openai_at(gateway.url, key, max_retries=3)) for key in keys]


async def converse(agent, name, turns, said):
    """Answers go to `said` as they come."""
    messages = []
    async for number in turns:
        messages.append(user(f"{name} {number}"))
        answer = (await ask(agent, messages)).choices[0].message.content
        said.append(answer)
        messages.append({"role": "assistant", "content": answer})


class Turns:
    """Numbers, for as many turns as are allowed so far of those that there will be."""

    def __init__(self, total):
        self.allowed, self._total = 0, total

    async def numbers(self):
        for number in range(self._total):
            while number >= self.allowed:
                await asyncio.sleep(0.01)
            yield number


async def test_connections_are_shared_out_evenly_and_a_pause_and_new_weights_reach_both(gateway, client):
    names = [f"paused-{number}" for number in range(6)]
    async with engine_at(gateway) as engine, AsyncExitStack() as stack:
        agents = await agents_of(stack, client, gateway, *names)
        await client.pause(drain_s=0)
        held = [asyncio.create_task(ask(agent, [user("held")])) for agent in agents]
        await gateway.both_say(held=3)
        assert (await client.state())["held"] == 6
        assert (await engine.info()).paused
        version = await client.publish(Weights(kind="folder", folder="/weights"))
        assert not any(task.done() for task in held)
        await client.resume()
        await asyncio.gather(*held)
        calls = await client.calls(names)
    assert [[span.version for call in calls[name] for span in call.spans] for name in names] == [[version]] * 6


async def test_no_answered_call_is_lost_when_workers_are_killed_and_each_rollout_is_one_sample(gateway, client):
    names, num_turns = [f"k{number}" for number in range(6)], 7
    said, turns = {name: [] for name in names}, Turns(num_turns)
    async with engine_at(gateway, token_delay_s=0.05), AsyncExitStack() as stack:
        agents = await agents_of(stack, client, gateway, *names)
        working = [
            asyncio.create_task(converse(agent, name, turns.numbers(), said[name]))
            for name, agent in zip(names, agents, strict=True)
        ]
        for victim, kill_at in zip(gateway.workers, (1, 4), strict=True):
            # In the midst of calls, since more turns are allowed.
            turns.allowed = kill_at + 2
            await until(lambda at=kill_at: said_as_much(said, at), timeout_s=60)
            killed_s = await gateway.kill(victim)
            # Whoever is asked knows that calls may have been lost, so that no agent is blamed for that.
            assert (await client.state())["recorded_since_s"] >= killed_s
            await gateway.restored(victim)
        turns.allowed = num_turns
        await asyncio.gather(*working)
        stored = await client.calls(names)
        for name, answers in said.items():
            (sample,), _ = build_samples(build_forest(stored[name]))
            # What was lost on its way is stored, too, and not trained.
            reply = {call.id: call.reply["content"] for call in stored[name]}
            assert [reply[call_id] for call_id in sample.call_ids] == answers
            assert len(answers) == num_turns
            # Each continues the one before, whichever worker had that.
            parents = {call.id: call.parent for call in stored[name]}
            assert [parents[call_id] for call_id in sample.call_ids] == [None, *sample.call_ids[:-1]]
        await client.finish(names[0], 0, Ending(outcome=Outcome.OK, reward=1.0))
        for _ in range(2):
            # Each time at the other worker.
            async with openai_at(gateway.url, agents[0].api_key) as agent:
                with pytest.raises(openai.ConflictError, match="is over"):
                    await ask(agent, [user("late")])


async def said_as_much(said, number):
    return all(len(answers) >= number for answers in said.values())


async def test_what_is_counted_is_that_of_both_and_goes_on_after_a_kill(gateway, client):
    async with engine_at(gateway), AsyncExitStack() as stack:
        # Both have told the others what they answered before.
        await asyncio.sleep(2 * BEAT_S + 0.5)
        before = await counted(gateway)
        agents = await agents_of(stack, client, gateway, "counted-0", "counted-1")
        for agent in agents:
            for text in ("one", "two", "three"):
                await ask(agent, [user(text)])
        for _ in range(4):
            await until(lambda: has_counted(gateway, before + 6))
        # Both have told the others.
        await asyncio.sleep(BEAT_S + 0.5)
        victim = gateway.workers[0]
        await gateway.kill(victim)
        await gateway.restored(victim)
        for _ in range(4):
            await until(lambda: has_counted(gateway, before + 6))
        assert [state["in_flight"] for state in (await gateway.signs()).values()] == [0, 0]


async def counted(gateway):
    """Calls, by a new connection: at the other worker each time."""
    async with http_to(gateway) as http:
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        return int(re.search(r"^manege_calls_total (\d+)$", (await http.get("/metrics")).text, re.MULTILINE)[1])


async def has_counted(gateway, number):
    return await counted(gateway) == number


async def test_sockets_of_agents_are_shared_out_and_go_to_the_other_worker_when_theirs_dies(gateway, client, caplog):
    caplog.set_level("INFO", "manege.controller")
    names = [f"handed-{number}" for number in range(4)]
    async with engine_at(gateway), AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(sandbox(client, claim)) for claim in await claimed(client, *names)]
        agents = [await stack.enter_async_context(openai_at(url, max_retries=3)) for url in urls]
        await client.pause()
        held = [asyncio.create_task(ask(agent, [user("hi")])) for agent in agents]
        await gateway.both_say(held=2)
        (victim, _) = gateway.workers
        await gateway.kill(victim)
        await gateway.restored(victim)
        await client.resume()
        await asyncio.gather(*held)
        for agent in agents:
            await ask(agent, [user("hi again")])
        assert [len((await client.calls([name]))[name]) for name in names] == [2] * 4
    assert "relayed" not in caplog.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_with_the_first_process_all_end_and_what_is_under_way_is_answered(postgres_url, tmp_path, number):
    with gateway_over(postgres_url, tmp_path) as gateway:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(gateway.url, OPERATOR_KEY))
            engine = await stack.enter_async_context(engine_for(gateway, token_delay_s=0.4))
            agents = await agents_of(stack, client, gateway, "ended-0", "ended-1")
            asking = [asyncio.create_task(ask(agent, [user("hi")])) for agent in agents]
            workers = gateway.workers
            await until(lambda: are_inside(engine, 2), timeout_s=30)
            await asyncio.to_thread(gateway.part.kill, number)
            answers = [(await task).choices[0].message.content for task in asking]
            assert [len(answer) for answer in answers] == [4, 4]
        # The port is free at once: the workers never had it.
        with socket.create_server(("127.0.0.1", int(gateway.url.rpartition(":")[2]))):
            pass
        await until(lambda: are_gone(workers), timeout_s=20)
    assert await gateway.signs() == {}


async def are_inside(engine, number):
    return engine.num_running == number


async def are_gone(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", 2], "needs engines elsewhere"),
        (["--workers", 2, "--engine", "none"], "give --store postgresql"),
        (["--workers", 2, "--engine", "none", "--store", "DATABASE", "--host", "0.0.0.0"], "choose a key"),
        (["--workers", 2, "--engine", "none", "--store", "DATABASE", "--port", "TAKEN"], "cannot listen"),
        (["--workers", 2, "--engine", "none", "--store", "DATABASE/missing"], "its last line says why"),
    ],
    ids=["local engine", "one file", "open to all", "port", "no database"],
)
async def test_what_cannot_work_is_refused(tmp_path, words, said):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        # Nothing is said there.
        database = f"postgresql://manege@127.0.0.1:{port}"
        words = [str(word).replace("DATABASE", database).replace("TAKEN", port) for word in words]
        command = ["gateway", "--model", TINY_MODEL, "--folder", tmp_path, "--port", 0, *words]
        code, _, errors = await asyncio.to_thread(finish, manege(*command), 60)
    assert code == 2
    assert said in errors.splitlines()[-1]
