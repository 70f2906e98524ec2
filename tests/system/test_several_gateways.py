"""Two gateways, processes of their own, on one PostgreSQL: to agents, controllers and trainers they are one."""

import asyncio
import itertools
import re
import signal
import time
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import httpx
import openai
import pytest

from manege.client import Client
from manege.engine.base import Weights
from manege.errors import ConfigError
from manege.gateway.presence import BEAT_S
from manege.gateway.server import GatewayServer
from manege.gateway.watchdog import STUCK_S
from manege.store.base import Ending
from manege.store.sql import SqlStore
from manege.types import Outcome, RolloutSpec, RunId, Task
from tests import postgres
from tests.conftest import OPERATOR_KEY, TINY_MODEL, gateway_app
from tests.system.test_gateway_pool import serving_engine
from tests.system.test_training import finish, manege

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

AUTH = {"authorization": f"Bearer {OPERATOR_KEY}"}


class Process:
    """A gateway without an engine, until one is registered."""

    def __init__(self, database, folder, key=OPERATOR_KEY):
        self._log = folder / "log.txt"
        folder.mkdir()
        words = ["--model", TINY_MODEL, "--engine", "none", "--port", 0, "--folder", folder, "--operator-key", key]
        with self._log.open("w") as file:
            self.process = manege("gateway", *words, "--store", database, stdout=file, stderr=file)

    def wait(self):
        """Until it serves."""
        deadline = time.monotonic() + 60
        while "gateway http" not in (said := self._log.read_text()):
            assert self.process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.05)
        self.url = said.split("gateway ")[1].split(",")[0]
        return self

    def kill(self):
        self.process.kill()
        self.process.wait()


@contextmanager
def processes(database, folder, number=2):
    made = [Process(database, folder / f"gateway-{index}") for index in range(number)]
    try:
        yield [each.wait() for each in made]
    finally:
        for each in made:
            each.kill()


@pytest.fixture(scope="module")
def pair(postgres_server, tmp_path_factory):
    with (
        postgres.schema(postgres_server) as database,
        processes(database, tmp_path_factory.mktemp("gateways")) as (a, b),
    ):
        yield a, b


@asynccontextmanager
async def clients_of(*gateways):
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Client(each.url, OPERATOR_KEY)) for each in gateways]


@pytest.fixture
async def clients(pair):
    async with clients_of(*pair) as (a, b):
        yield a, b
        await a.resume()


async def models(gateway, method, body=None):
    async with httpx.AsyncClient(headers=AUTH, trust_env=False, timeout=30) as http:
        answered = await http.request(method, f"{gateway.url}/api/models", json=body)
    assert answered.is_success, answered.text


@asynccontextmanager
async def engine_at(gateway, letter="x", **options):
    """An engine that answers with one letter, registered at one gateway."""
    async with serving_engine(letter, **options) as (engine, url):
        await models(gateway, "POST", [{"model": "m", "endpoint": url, "mode": "tokens"}])
        try:
            yield engine
        finally:
            await models(gateway, "DELETE")


def spec(name, run="run"):
    return RolloutSpec(id=name, run=RunId(run), task=Task(id="t", input={}))


async def begin(client, name, run="run"):
    """The key of a rollout that runs."""
    await client.create_rollouts([spec(name, run)])
    (claim,) = await client.claim(controller="c", limit=1, lease_s=300)
    assert claim.rollout.spec.id == name
    return claim.agent_key


@asynccontextmanager
async def agent(gateway, key):
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, http_client=httpx.AsyncClient(trust_env=False)
    ) as opened:
        yield opened


async def ask(opened, *texts):
    """The message that is answered; `texts` alternate between user and assistant."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return (await opened.chat.completions.create(model="any", messages=messages)).choices[0].message.content


async def until(condition):
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_calls_that_alternate_between_gateways_are_one_conversation(pair, clients):
    async with engine_at(pair[0]), AsyncExitStack() as stack:
        key = await begin(clients[0], "alternating")
        agents = [await stack.enter_async_context(agent(each, key)) for each in pair]
        texts = ["number 0"]
        for number in range(1, 7):
            texts += [await ask(agents[number % 2], *texts), f"number {number}"]
        # What one gateway served twice in a row it knows by itself.
        await ask(agents[0], *texts)
        calls = (await clients[1].calls(["alternating"]))["alternating"]
    assert [call.parent for call in calls] == [None, *(call.id for call in calls[:-1])]
    for parent, call in itertools.pairwise(calls):
        context = [*parent.prompt_ids_P.tolist(), *parent.response_ids_R.tolist()]
        assert call.prompt_ids_P.tolist()[: len(context)] == context
        assert len(call.request["messages"]) == 1
    for client in clients:
        assert [call.id for call in (await client.calls(["alternating"]))["alternating"]] == [c.id for c in calls]


async def test_a_rollout_is_claimed_at_one_called_at_the_other_and_its_key_dies_at_both(pair, clients):
    async with engine_at(pair[1]), AsyncExitStack() as stack:
        key = await begin(clients[0], "finished")
        agents = [await stack.enter_async_context(agent(each, key)) for each in pair]
        assert await ask(agents[1], "hi") == await ask(agents[0], "hi") == "x" * 8
        await clients[0].finish("finished", 0, Ending(outcome=Outcome.OK, reward=1.0))
        for each in reversed(agents):
            with pytest.raises(openai.ConflictError, match="is over"):
                await ask(each, "hi")
        assert (await clients[1].get_rollout("finished")).reward == 1.0


async def test_a_pause_at_one_holds_and_drains_both_and_ends_at_either(pair, clients):
    a, b = clients
    async with engine_at(pair[0], token_delay_s=0.2) as engine, AsyncExitStack() as stack:
        key = await begin(a, "paused")
        agents = [await stack.enter_async_context(agent(each, key)) for each in pair]
        inside = [asyncio.create_task(ask(each, "inside")) for each in agents]
        await until(lambda: counted(engine, 2))
        pausing = asyncio.create_task(a.pause(drain_s=60))
        await until(lambda: paused(b))
        held = [asyncio.create_task(ask(each, "held")) for each in agents]
        await until(lambda: states(a, "held", 1))
        await until(lambda: states(b, "held", 1))
        assert not pausing.done()
        assert (await a.state())["inflight"] == 2
        await pausing
        # The answers were stored before the pause was.
        assert len((await a.calls(["paused"]))["paused"]) == 2
        assert [await task for task in inside] == ["x" * 8] * 2
        assert (await engine.info()).paused
        version = await b.publish(Weights(kind="folder", folder="/weights"))
        await b.resume()
        assert [await task for task in held] == ["x" * 8] * 2
        calls = (await a.calls(["paused"]))["paused"]
        assert [[span.version for span in call.spans] for call in calls[2:]] == [[version]] * 2
        assert not (await a.state())["paused"]


def without_versions(app):
    """As vLLM: tokens do not say which weights sampled them while they come."""

    async def vague(scope, receive, send):
        async def send_less(message):
            if body := message.get("body"):
                message = {**message, "body": re.sub(rb'"weight_version":"\d+",', b"", body)}
            await send(message)

        await app(scope, receive, send_less if scope["path"].endswith("/generate") else send)

    return vague


async def test_a_gateway_knows_the_version_that_another_one_published(pair, clients):
    async with engine_at(pair[0], wrap=without_versions), AsyncExitStack() as stack:
        key = await begin(clients[0], "versions")
        agents = [await stack.enter_async_context(agent(each, key)) for each in pair]
        for each in agents:
            await ask(each, "hi")
        await clients[0].pause(drain_s=60)
        version = await clients[1].publish(Weights(kind="folder", folder="/weights"))
        await clients[1].resume()
        for each in agents:
            await ask(each, "hi")
        calls = (await clients[0].calls(["versions"]))["versions"]
    assert [[span.version for span in call.spans] for call in calls] == [[0], [0], [version], [version]]


async def counted(engine, number):
    return engine.num_running == number


async def paused(client):
    return (await client.state())["paused"]


async def states(client, name, number):
    return (await client.state())[name] == number


async def test_a_pause_waits_for_a_gateway_that_does_not_say_yet_that_it_holds_calls(pair, clients):
    """Its last sign of life knows of no call: it is frozen right after it let one in."""
    frozen = pair[1].process
    async with engine_at(pair[0], token_delay_s=0.05) as engine:
        key = await begin(clients[0], "frozen")
        async with agent(pair[1], key) as opened:
            asking = asyncio.create_task(ask(opened, "hi"))
            await until(lambda: counted(engine, 1))
            frozen.send_signal(signal.SIGSTOP)
            try:
                pausing = asyncio.create_task(clients[0].pause(drain_s=60))
                await asyncio.sleep(3)
                assert not pausing.done()
            finally:
                frozen.send_signal(signal.SIGCONT)
            await pausing
            assert len((await clients[0].calls(["frozen"]))["frozen"]) == 1
            assert await asking == "x" * 8
            await clients[0].resume()


async def test_models_and_settings_agree(pair, clients):
    a, b = pair
    await clients[0].put_run(RunId("short"), {"sampling": {"max_new_tokens": 3}})
    key = await begin(clients[0], "models", run="short")
    async with engine_at(a, "x"), engine_at(b, "y"), agent(b, key) as opened:
        # Both serve, at both; with one of them forgotten, the other does.
        answers = {await ask(opened, f"number {number}") for number in range(12)}
        assert answers <= {"xxx", "yyy"}
        await clients[0].put_run(RunId("short"), {"sampling": {"max_new_tokens": 2}})
        await until(lambda: said(opened, 2))
    async with agent(a, key) as opened:
        await until(lambda: refused(opened))


async def said(opened, length):
    return len(await ask(opened, "hi")) == length


async def refused(opened):
    try:
        await ask(opened, "hi")
    except openai.InternalServerError as error:
        return error.status_code == 503 and "no engine is registered" in str(error)
    return False


async def test_the_feed_of_ends_is_one_whoever_writes_and_whoever_reads(clients):
    names = [f"ended-{number:02}" for number in range(60)]
    await clients[0].create_rollouts([spec(name, run="feed") for name in names])
    claimed = [claim for client in clients for claim in await client.claim(controller="c", limit=30, lease_s=300)]
    assert sorted(claim.rollout.spec.id for claim in claimed) == names

    async def read(client):
        seen, cursor = [], 0
        while len(seen) < len(names):
            page = await client.terminal(run=RunId("feed"), after=cursor, limit=7, wait_s=20)
            assert page.rollouts
            seen, cursor = [*seen, *(rollout.spec.id for rollout in page.rollouts)], page.cursor
        return seen

    async def write(client, part):
        for claim in part:
            await client.finish(claim.rollout.spec.id, 0, Ending(outcome=Outcome.OK, reward=0.0))
            await asyncio.sleep(0.005)

    reading = [asyncio.create_task(read(client)) for client in clients]
    await asyncio.sleep(0.2)
    # Each writer ends what was claimed at the other gateway.
    await asyncio.gather(write(clients[0], claimed[30:]), write(clients[1], claimed[:30]))
    first, second = await asyncio.gather(*reading)
    assert first == second
    assert sorted(first) == names


async def test_a_long_poll_at_one_wakes_at_once_when_something_is_queued_or_ends_at_the_other(clients):
    a, b = clients
    cursor, waited_s = (await b.terminal(run=None, after=0, limit=1000)).cursor, 0.0
    for number in range(4):
        name = f"woken-{number}"
        for begin_poll, write in (
            (b.claim(controller="c", limit=1, lease_s=300, wait_s=20), a.create_rollouts([spec(name, run="wake")])),
            (b.terminal(run=RunId("wake"), after=cursor, wait_s=20), a.cancel(name)),
        ):
            polling = asyncio.create_task(begin_poll)
            await asyncio.sleep(0.1)
            begun = time.monotonic()
            await write
            found = await polling
            waited_s += time.monotonic() - begun
        assert [rollout.spec.id for rollout in found.rollouts] == [name]
        cursor = found.cursor
    # Without a notice each of the eight looks again after a second.
    assert waited_s < 4


async def test_a_gateway_that_is_killed_while_paused_leaves_a_pause_that_the_other_ends(postgres_url, tmp_path):
    with processes(postgres_url, tmp_path) as (a, b):
        async with clients_of(a, b) as (client, other), engine_at(b) as engine:
            key = await begin(client, "r")
            await client.pause(drain_s=10)
            a.kill()
            async with agent(b, key) as opened:
                asking = asyncio.create_task(ask(opened, "hi"))
                await until(lambda: states(other, "held", 1))
                version = await other.publish(Weights(kind="folder", folder="/weights"))
                await other.resume()
                assert await asking == "x" * 8
            (call,) = (await other.calls(["r"]))["r"]
            assert [span.version for span in call.spans] == [version]
            # The dead one is waited for no longer than it takes to know that it is dead.
            begun = time.monotonic()
            await other.pause(drain_s=60)
            assert time.monotonic() - begun < 20
            assert (await engine.info()).paused
            await other.resume()


async def test_what_moves_at_one_gateway_is_progress_at_the_other(postgres_url, caplog):
    """A rollout runs for 75 s of the gateways' clock; only one of them sees it move."""
    added_s = 0.0
    stores = [await SqlStore.open(postgres_url) for _ in range(2)]
    apps = [gateway_app(store, None, clock=lambda: time.time() + added_s) for store in stores]
    async with (
        GatewayServer(apps[0]) as moving,
        GatewayServer(apps[1]) as idle,
        clients_of(moving, idle) as (client, _),
    ):
        await begin(client, "r")
        for _ in range(3):
            added_s += 25
            moving.services.progress.made()
            await asyncio.sleep(BEAT_S + 0.5)
        assert caplog.records == []
        assert (await idle.services.presence.oldest())["running"] < time.time()
        added_s += STUCK_S
        async with asyncio.timeout(10):
            while sum("stuck" in record.message for record in caplog.records) < 2:
                await asyncio.sleep(0.05)
    for store in stores:
        await store.close()


async def test_gateways_of_one_database_have_one_operator_key(postgres_url, tmp_path):
    store = await SqlStore.open(postgres_url)
    async with GatewayServer(gateway_app(store, None)) as server, Client(server.url, OPERATOR_KEY) as client:
        refused = Process(postgres_url, tmp_path / "third", key="mo-another")
        code, *_ = await asyncio.to_thread(finish, refused.process, 60)
        (said,) = (tmp_path / "third" / "log.txt").read_text().splitlines()
        assert code == 2
        assert "the operator key is not the one" in said
        assert "--operator-key KEY" in said
        await begin(client, "running")
    other = await SqlStore.open(postgres_url)
    # Nobody else is there, but an agent's key derives from the old one.
    with pytest.raises(ConfigError, match="the operator key is not the one"):
        await GatewayServer(gateway_app(other, None, operator_key="mo-another")).start()
    await other.cancel("running")
    async with GatewayServer(gateway_app(other, None, operator_key="mo-another")):
        with pytest.raises(ConfigError, match="the operator key is not the one"):
            await GatewayServer(gateway_app(store, None)).start()
    for each in (store, other):
        assert await each.gateways() == []
        await each.close()


async def test_calls_go_on_while_the_database_is_away_for_ten_seconds(tmp_path):
    """None is lost, none is recorded twice."""
    with postgres.server() as server, processes(server.url, tmp_path) as (a, b):
        async with clients_of(a, b) as clients, engine_at(a, token_delay_s=0.01), AsyncExitStack() as stack:
            names = [f"r{number}" for number in range(4)]
            keys = [await begin(clients[0], name) for name in names]
            answered: dict[str, int] = {}
            is_over = asyncio.Event()

            async def work(number):
                agents = [await stack.enter_async_context(agent(each, keys[number])) for each in (a, b)]
                texts = ["number 0"]
                while not is_over.is_set():
                    turn = len(texts) // 2
                    texts += [await ask(agents[(number + turn) % 2], *texts), f"number {turn + 1}"]
                    answered[f"r{number}"] = turn + 1
                    await asyncio.sleep(0.1)

            working = [asyncio.create_task(work(number)) for number in range(4)]
            # Few turns, since the tiny model's context is short.
            await until(lambda: grown(answered, dict.fromkeys(names, 0), 2))
            await asyncio.to_thread(server.stop, "immediate")
            before = dict(answered)
            await asyncio.sleep(10)
            # At most what had been stored already was answered meanwhile: the others are held.
            assert all(answered[name] <= before[name] + 1 for name in answered)
            await asyncio.to_thread(server.start)
            await until(lambda: grown(answered, before, 5))
            is_over.set()
            await asyncio.gather(*working)
            for name, number in answered.items():
                calls = (await clients[1].calls([name]))[name]
                assert len({call.id for call in calls}) == len(calls) == number
                assert [call.parent for call in calls] == [None, *(call.id for call in calls[:-1])]
            # Signs of life and notices came back, too.
            await clients[0].pause(drain_s=30)
            await until(lambda: paused(clients[1]))
            await clients[1].resume()


async def grown(answered, before, number):
    return all(answered.get(name, 0) > before[name] + number for name in before)
