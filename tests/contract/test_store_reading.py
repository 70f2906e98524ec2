"""What the store says about what it holds, and how it forgets: on both databases."""

import asyncio
import dataclasses

import pytest

from manege.errors import ConflictError, NotFoundError
from manege.store.base import EVERYTHING, Changes, Ending
from manege.store.reading import StoreReader
from manege.types import Event, Outcome, RolloutSpec, RolloutState, Task
from tests.calls import make_call

pytestmark = pytest.mark.anyio


def spec(name, run="run", group=None):
    return RolloutSpec(id=name, run=run, group=group, task=Task(id="t", input={}))


async def ended(store, *names, run="run", reward=None):
    await store.create_rollouts([spec(name, run) for name in names])
    await store.claim(controller="c", limit=len(names), lease_s=30)
    for name in names:
        await store.finish(name, 0, Ending(outcome=Outcome.OK, reward=reward))


async def names(store, **query):
    return [rollout.spec.id for rollout in (await store.list_rollouts(**query)).rollouts]


def asked(text, **more):
    tools = [{"type": "function", "function": {"name": "bash", "description": "x" * 30_000}}]
    return {"request": {"messages": [{"role": "user", "content": text}], "tools": tools}, **more}


async def counted(store, table):
    return await store._read(lambda connection: connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar())


async def test_rollouts_are_found_by_group_time_and_several_states(store, clock):
    for number in range(4):
        clock.now_s = 100.0 * number
        await store.create_rollouts([spec(f"r{number}", group=f"g{number % 2}")])
    await store.claim(controller="c", limit=1, lease_s=30)
    await store.cancel("r1")
    assert await names(store, group="g1") == ["r1", "r3"]
    assert await names(store, since_s=100.0, until_s=300.0) == ["r1", "r2"]
    assert await names(store, state={RolloutState.RUNNING, RolloutState.CANCELLED}) == ["r0", "r1"]
    assert await names(store, state=RolloutState.QUEUING, group="g0", limit=None) == ["r2"]


async def test_pages_miss_nothing_and_repeat_nothing_while_rollouts_come_and_go(store):
    await store.create_rollouts([spec(f"r{number}") for number in range(10)])
    seen, cursor = [], 0
    while (page := await store.list_rollouts(after=cursor, limit=3)).rollouts:
        seen += [rollout.spec.id for rollout in page.rollouts]
        cursor = page.cursor
        if len(seen) == 3:
            await store.delete_rollout("r1")
            await store.claim(controller="c", limit=4, lease_s=30)
            await store.create_rollouts([spec("late")])
    assert seen == [*[f"r{number}" for number in range(10)], "late"]


async def test_a_subscriber_hears_of_a_change_before_its_writer_goes_on(store):
    heard, known = [], []
    store.subscribe(heard.append)
    for write in (
        lambda: store.create_rollouts([spec("a"), spec("b")]),
        lambda: store.put_run("run", {}),
        lambda: store.set_value("key", 1),
        lambda: store.claim(controller="c", limit=1, lease_s=30),
        lambda: store.finish("a", 0, Ending(outcome=Outcome.OK)),
        lambda: store.delete_rollout("b"),
    ):
        # On PostgreSQL one may hear that the connection which listens has been made.
        heard[:] = []
        await write()
        known.append([changes for changes in heard if changes != EVERYTHING])
    assert known == [
        [Changes(rollouts=frozenset({"a", "b"}))],
        [Changes(runs=frozenset({"run"}))],
        [Changes(keys=frozenset({"key"}))],
        [Changes(rollouts=frozenset({"a"}))],
        [Changes(rollouts=frozenset({"a"}))],
        [Changes(rollouts=frozenset({"b"}))],
    ]


async def test_a_value_is_changed_without_losing_changes(store):
    def add(value):
        return (value or 0) + 1

    assert sorted(await asyncio.gather(*[store.update_value("n", add) for _ in range(30)])) == list(range(1, 31))

    def refuse(_):
        raise ConflictError("no")

    with pytest.raises(ConflictError, match="no"):
        await store.update_value("n", refuse)
    assert await store.get_value("n") == 30


async def test_gateways_are_known_by_their_signs_of_life(store, clock):
    await store.beat("g1", {"in_flight": 1})
    clock.now_s += 5
    await store.beat("g2", {})
    await store.beat("g1", {"in_flight": 0})
    await store.leave("g2")
    [gateway] = await store.gateways()
    assert (gateway.id, gateway.seen_s, gateway.state) == ("g1", 1005.0, {"in_flight": 0})


async def test_a_run_is_told_in_numbers_and_by_what_waits_longest(store, clock):
    await ended(store, "a", "b", reward=0.5)
    clock.now_s = 2000.0
    await store.create_rollouts([spec("c"), spec("d"), spec("other", run="x")])
    await store.claim(controller="c", limit=1, lease_s=30)
    await store.add_call(make_call("c1", [1, 2], [3, 4, 5], rollout="c"))
    stats = await store.run_stats("run")
    assert (stats.num_calls, stats.sampled_tokens) == (1, 3)  # not indexed yet
    assert set(await store.pending(run="run")) == {"queued", "running", "raw_call"}
    await store.set_delivered("c1", "yes")
    stats = await store.run_stats("run")
    assert (stats.num_calls, stats.sampled_tokens, stats.reward_mean) == (1, 3, 0.5)
    assert stats.states == {RolloutState.SUCCEEDED: 2, RolloutState.RUNNING: 1, RolloutState.QUEUING: 1}
    assert (stats.outcomes, stats.first_s, stats.last_s) == ({Outcome.OK: 2}, 1000.0, 2000.0)
    assert await store.pending(run="run") == {"queued": 2000.0, "running": 2000.0}
    assert await store.pending(run="x") == {"queued": 2000.0}
    assert await store.pending(run="none") == {}
    assert (await store.run_stats("none")).num_calls == 0


async def test_parts_of_requests_are_kept_once_and_come_back_whole(store):
    await store.create_rollouts([spec("a"), spec("b")])
    await store.claim(controller="c", limit=2, lease_s=30)
    headers = {"user-agent": "x"}
    kept = [
        make_call(f"{name}{number}", [1], [2], rollout=name, **asked(f"{number}", headers=headers))
        for name in "ab"
        for number in range(20)
    ]
    odd = [
        make_call("text", [1], [2], rollout="a", request={"prompt": "p", "messages": "no list", "tools": []}),
        make_call("none", [1], [2], rollout="a", request={}),
    ]
    for call in (*kept, *odd):
        await store.add_call(call)
    await store.set_delivered("none", "yes")
    found = await store.calls(["a", "b"])
    assert [(call.request, call.headers) for call in (*found["a"][:20], *found["b"], *found["a"][20:])] == [
        (call.request, call.headers) for call in (*kept, *odd)
    ]
    # The messages, the tool, the headers, what else the odd request has, and {} where there is nothing else.
    assert await counted(store, "contents") == 20 + 1 + 1 + 1 + 1


async def test_a_pruned_run_is_gone_with_what_only_it_had(store):
    await store.put_run("old", {"name": "old"})
    for run in ("old", "new"):
        await store.create_rollouts([spec(f"{run}1", run)])
        await store.claim(controller="c", limit=1, lease_s=30)
        call = make_call(f"{run}c", [1], [2], rollout=f"{run}1", **asked(run))
        await store.add_call(call)
        await store.add_event(Event(rollout_id=f"{run}1", attempt=0, event_type="e", data={}, timestamp_s=1.0))
        if run == "old":
            with pytest.raises(ConflictError, match="has 1 rollouts that have not ended"):
                await store.prune_run("old")
        await store.finish(f"{run}1", 0, Ending(outcome=Outcome.OK))
    await store.set_delivered("newc", "yes")
    parts = await counted(store, "contents")
    assert await store.prune_run("old") == 1
    assert await counted(store, "contents") == parts - 1  # its own message
    with pytest.raises(NotFoundError):
        await store.get_run("old")
    assert await names(store, run="old") == []
    for table in ("calls", "events", "rollouts"):
        assert await counted(store, table) == 1
    [call] = (await store.calls(["new1"]))["new1"]
    assert call.request == asked("new")["request"]
    # What was deleted is stored anew when it comes again.
    await store.create_rollouts([spec("again")])
    await store.claim(controller="c", limit=1, lease_s=30)
    await store.add_call(make_call("againc", [1], [2], rollout="again", **asked("old")))
    await store.set_delivered("againc", "yes")
    assert (await store.calls(["again"]))["again"][0].request == asked("old")["request"]


async def test_calls_of_many_rollouts_and_attempts_come_in_their_order(store):
    await store.create_rollouts([spec(name) for name in "abc"])
    await store.claim(controller="c", limit=3, lease_s=30)
    for number in range(30):
        name = "abc"[number % 3]
        await store.add_call(make_call(f"{name}{number}", [1, 2, number], [number], rollout=name))
    await store.finish("b", 0, Ending(outcome=Outcome.INFRA_ERROR))
    await store.claim(controller="c", limit=1, lease_s=30)
    await store.add_call(dataclasses.replace(make_call("again", [1, 2, 3], [4], rollout="b"), attempt=1))
    found = await store.calls(["c", "b", "missing", "a"])
    assert list(found) == ["c", "b", "missing", "a"]
    assert [call.id for call in found["a"]] == [f"a{number}" for number in range(0, 30, 3)]
    assert [call.id for call in found["b"]] == ["again"]
    assert await store.attempt_call_ids("b", 0) == [f"b{number}" for number in range(1, 30, 3)]
    assert all(call.prompt_ids_P.tolist() == [1, 2, int(call.id[1:])] for call in found["c"])


async def test_a_backup_is_made_while_others_write(store, tmp_path):
    async def write():
        for number in range(200):
            await ended(store, f"w{number}")

    await ended(store, "before")
    writing = asyncio.create_task(write())
    await asyncio.sleep(0.02)
    await store.backup(tmp_path / "copy")
    assert not writing.done()
    await writing
    if store.is_shared:
        assert (tmp_path / "copy").read_bytes()[:5] == b"PGDMP"
        return
    copy = await StoreReader.open(tmp_path / "copy")
    found = (await copy.list_rollouts(limit=None)).rollouts
    assert 1 <= len(found) < 201
    page = await copy.terminal(run=None, after=0, limit=500)
    assert [rollout.completion for rollout in page.rollouts] == list(range(1, len(page.rollouts) + 1))
    await copy.close()
