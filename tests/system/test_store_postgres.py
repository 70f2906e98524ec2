"""PostgreSQL as several gateways use it, and as it fails: two stores on one database, a server that goes away, a
connection that breaks at the worst moment."""

import asyncio
import contextlib

import pytest

from manege.errors import ConfigError, ConflictError, StoreError, UnprocessableError
from manege.store.base import EVERYTHING, Ending
from manege.store.reading import StoreReader
from manege.store.sql import SqlStore
from manege.types import Event, Outcome, RolloutSpec, RolloutState, Task
from tests import postgres
from tests.calls import make_call

pytestmark = pytest.mark.anyio


@pytest.fixture
async def stores(postgres_url):
    one, other = await SqlStore.open(postgres_url), await SqlStore.open(postgres_url)
    yield one, other
    await one.close()
    await other.close()


def spec(name):
    return RolloutSpec(id=name, run="run", task=Task(id="t", input={}))


async def until(true):
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def running(store, *names):
    await store.create_rollouts([spec(name) for name in names])
    await store.claim(controller="c", limit=len(names), lease_s=600)


async def test_two_stores_claim_and_end_rollouts_in_one_order(stores):
    names = [f"r{number}" for number in range(120)]
    await stores[0].create_rollouts([spec(name) for name in names])
    seen, cursor = [], 0

    async def work(store, worker):
        while claimed := await store.claim(controller=f"c{worker}", limit=3, lease_s=600):
            for rollout in claimed:
                await store.finish(rollout.spec.id, 0, Ending(outcome=Outcome.OK, reward=1.0))

    async def read():
        nonlocal cursor
        while len(seen) < len(names):
            page = await stores[1].terminal(run="run", after=cursor, limit=7)
            seen.extend(page.rollouts)
            cursor = page.cursor

    await asyncio.gather(read(), *[work(stores[worker % 2], worker) for worker in range(8)])
    assert sorted(rollout.spec.id for rollout in seen) == sorted(names)
    assert [rollout.completion for rollout in seen] == list(range(1, len(names) + 1))
    versions = await asyncio.gather(*[store.publish_version() for store in stores * 10])
    assert sorted(versions) == list(range(1, 21))


async def test_what_one_store_writes_the_other_hears_and_knows(stores):
    one, other = stores
    heard = []
    other.subscribe(heard.append)
    await running(one, "r")
    await one.set_value("k", 1)
    await until(lambda: any("k" in changes.keys for changes in heard))
    assert any("r" in changes.rollouts for changes in heard)
    heard[:] = []
    # A running rollout is remembered until somebody says that it has changed.
    assert (await other.get_rollout("r")).state is RolloutState.RUNNING
    await one.cancel("r")
    await until(lambda: any("r" in changes.rollouts for changes in heard))
    assert (await other.get_rollout("r")).state is RolloutState.CANCELLED


async def test_a_store_that_knows_an_attempt_as_open_still_refuses_its_calls_once_another_ended_it(stores):
    one, other = stores
    await running(one, "r", "s")
    await other.add_call(make_call("c1", [1], [2]))
    await one.add_call(make_call("c2", [1, 2, 3], [4]))
    await one.finish("r", 0, Ending(outcome=Outcome.OK))
    with pytest.raises(ConflictError, match="is over"):
        await other.add_call(make_call("c3", [1], [2]))
    await other.add_call(make_call("c4", [1], [2], rollout="s"))
    found = await one.calls(["r", "s"])
    assert [[call.id for call in calls] for calls in found.values()] == [["c1", "c2"], ["c4"]]
    assert found["r"][1].prompt_ids_P.tolist() == [1, 2, 3]


async def test_a_store_stores_parts_anew_that_another_one_pruned(stores):
    one, other = stores
    request = {"messages": [{"role": "user", "content": "the same"}]}
    await running(one, "r")
    await other.add_call(make_call("c1", [1], [2], request=request))
    await other.set_delivered("c1", "yes")
    await one.finish("r", 0, Ending(outcome=Outcome.OK))
    await one.prune_run("run")
    await running(other, "r")
    await other.add_call(make_call("c2", [1], [2], request=request))
    await other.set_delivered("c2", "yes")
    assert (await one.calls(["r"]))["r"][0].request == request


async def test_a_server_that_goes_away_is_waited_for(tmp_path):
    with postgres.server() as server:
        store = await SqlStore.open(server.url)
        heard = []
        store.subscribe(heard.append)
        await running(store, "r")
        server.stop("immediate")

        async def write(number):
            await store.add_call(make_call(f"c{number}", [1], [2]))
            await store.add_event(Event(rollout_id="r", attempt=0, event_type="e", data={"n": number}, timestamp_s=1.0))

        waiting = [asyncio.create_task(write(number)) for number in range(20)]
        reading = asyncio.create_task(store.list_rollouts())
        with pytest.raises(StoreError, match="is it running"):
            await StoreReader.open(server.url)
        await asyncio.sleep(2)
        assert not any(task.done() for task in (*waiting, reading))
        heard[:] = []
        server.start()
        await asyncio.gather(*waiting)
        assert [rollout.spec.id for rollout in (await reading).rollouts] == ["r"]
        assert len((await store.calls(["r"]))["r"]) == 20
        assert sorted(event.data["n"] for event in await store.events("r")) == list(range(20))
        # What others said meanwhile was not heard.
        await until(lambda: EVERYTHING in heard)
        await store.close()


async def test_a_value_that_cannot_be_stored_fails_its_caller_alone(stores):
    await running(stores[0], "r")

    def event(kind):
        return Event(rollout_id="r", attempt=0, event_type=kind, data={"text": "a\0b"}, timestamp_s=1.0)

    writing = [stores[0].add_event(event(kind)) for kind in ("one", "no\0ne", "two")]
    results = await asyncio.gather(*writing, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), UnprocessableError, type(None)]
    assert [(each.event_type, each.data["text"]) for each in await stores[1].events("r")] == [
        ("one", "a\0b"),
        ("two", "a\0b"),
    ]
    with pytest.raises(UnprocessableError, match="NUL"):
        await stores[0].get_rollout("r\0")


class Cutter:
    """A proxy that breaks a connection when its client commits: before the server hears of it, or before the client
    hears of the server's answer."""

    def __init__(self, url):
        self._target = url.partition("@")[2].partition("/")[0].partition(":")
        self.cut = None
        self.num_cut = 0
        self._serving = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_):
        self._server.close()
        # All clients have closed, or have been cut off.
        await asyncio.gather(*self._serving)

    @property
    def port(self):
        return self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader, writer):
        self._serving.append(asyncio.current_task())
        host, _, port = self._target
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        answers = asyncio.create_task(self._forward(to_reader, writer))
        while data := await reader.read(65536):
            if self.cut and b"COMMIT" in data:
                when, self.cut = self.cut, None
                self.num_cut += 1
                answers.cancel()
                await asyncio.wait({answers})
                if when == "after":
                    to_writer.write(data)
                    await to_reader.read(65536)
                break
            to_writer.write(data)
        for each in (to_writer, writer):
            each.close()
            with contextlib.suppress(ConnectionError):
                await each.wait_closed()
        await asyncio.wait({answers})

    async def _forward(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_that_nobody_answers_happens_once(postgres_url, when):
    async with Cutter(postgres_url) as proxy:
        server = postgres_url.partition("@")[2].partition("/")[0]
        store = await SqlStore.open(postgres_url.replace(server, f"127.0.0.1:{proxy.port}"))
        await running(store, "r")
        for number in range(3):
            proxy.cut = when
            event = Event(rollout_id="r", attempt=0, event_type="e", data={"n": number}, timestamp_s=1.0)
            await asyncio.gather(store.add_event(event), store.add_call(make_call(f"c{number}", [1], [2])))
            assert await store.publish_version() == number + 1
        assert proxy.num_cut == 3
        assert [event.data["n"] for event in await store.events("r")] == [0, 1, 2]
        assert [call.id for call in (await store.calls(["r"]))["r"]] == ["c0", "c1", "c2"]
        await store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://nobody@127.0.0.1:1/none", "is it running, and is its address right"),
        ("postgresql://nobody:secret@127.0.0.1:1/none", r"postgresql://nobody:\*\*\*@"),
    ],
)
async def test_a_server_that_is_not_there_is_named_without_its_password(url, message):
    with pytest.raises((StoreError, ConfigError), match=message):
        await SqlStore.open(url)
