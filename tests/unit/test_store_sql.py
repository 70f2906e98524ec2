"""What only the SQL store can get wrong: schema, durability settings, size on disk, failures of the database."""

import asyncio
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import event

from manege.errors import ConfigError, StoreError
from manege.store.base import Ending
from manege.store.reading import StoreReader
from manege.store.sql import SqlStore
from manege.types import Outcome, RolloutSpec, Task
from tests.calls import make_call

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent.parent


def spec(name, text=""):
    return RolloutSpec(id=name, run="run", task=Task(id="t", input={"text": text}))


def used_bytes(path):
    """Pages that hold something: those of calls that were indexed since are free for the next ones."""
    with closing(sqlite3.connect(path)) as connection:
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * size


async def test_a_newer_schema_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "store.db"
    await (await SqlStore.open(path)).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = '0700'")
    connection.commit()
    connection.close()
    with pytest.raises(ConfigError, match=r"has schema 0700.*upgrade manege"):
        await SqlStore.open(path)


@pytest.mark.parametrize(
    ("url", "message"),
    [("mysql://x/y", "not supported"), (":memory:", "name a file"), ("sqlite://", "name a file")],
)
async def test_a_database_that_cannot_be_used_is_refused(url, message):
    with pytest.raises(ConfigError, match=message):
        await SqlStore.open(url)


async def test_a_file_that_is_no_database_and_a_missing_folder_are_named(tmp_path):
    (tmp_path / "text").write_text("hello " * 1000)
    with pytest.raises(StoreError, match=r"text failed.*not an SQLite database"):
        await SqlStore.open(tmp_path / "text")
    with pytest.raises(StoreError, match="its folder exists"):
        await SqlStore.open(tmp_path / "none" / "store.db")


async def test_a_reader_sees_what_is_written_beside_it_and_stops_nobody(tmp_path):
    path = tmp_path / "a ? b.db"
    store = await SqlStore.open(path)
    await store.create_rollouts([spec("r0")])
    reader = await StoreReader.open(path)
    with reader._reading.connect() as open_transaction:
        open_transaction.exec_driver_sql("SELECT count(*) FROM rollouts").scalar_one()
        await store.create_rollouts([spec("r1")])
        await store.add_call(make_call("c", [1, 2], [3], rollout="r1"))
    assert [rollout.spec.id for rollout in (await reader.list_rollouts()).rollouts] == ["r0", "r1"]
    assert await reader.run_ids() == ["run"]
    [call] = (await reader.calls(["r1"]))["r1"]
    assert call.prompt_ids_P.tolist() == [1, 2]
    with pytest.raises(StoreError, match="SQLITE_READONLY"):
        await reader._read(lambda connection: connection.exec_driver_sql("DELETE FROM rollouts"))
    await reader.close()
    await store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a ? b.db", "a ? b.db.lock"]


async def test_a_reader_makes_and_migrates_nothing(tmp_path):
    with pytest.raises(StoreError, match="its folder exists"):
        await StoreReader.open(tmp_path / "none.db")
    assert not list(tmp_path.iterdir())
    path = tmp_path / "store.db"
    await (await SqlStore.open(path)).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = '0001'")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"has schema 0001.*migrates it"):
        await StoreReader.open(path)
    assert path.read_bytes() == before


async def test_a_reader_of_a_file_without_our_tables_is_told_so(tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(ConfigError, match="holds nothing of manege's"):
        await StoreReader.open(path)


async def test_a_reader_finds_what_a_killed_writer_left_in_its_log(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    await store.create_rollouts([spec("r0")])
    (tmp_path / "copy").mkdir()
    for name in ("store.db", "store.db-wal"):
        shutil.copy(tmp_path / name, tmp_path / "copy" / name)
    await store.close()
    reader = await StoreReader.open(tmp_path / "copy" / "store.db")
    assert [rollout.spec.id for rollout in (await reader.list_rollouts()).rollouts] == ["r0"]
    await reader.close()


async def test_commits_are_synced_to_the_write_ahead_log(tmp_path):
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    settings = await store._writer.submit(
        lambda connection: [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")
        ]
    )
    await store.close()
    assert settings == ["wal", 2]


async def test_many_writes_share_a_commit(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    commits = []
    event.listen(store._writing, "commit", commits.append)
    await asyncio.gather(*(store.create_rollouts([spec(f"r{number}")]) for number in range(200)))
    await store.close()
    assert 1 <= len(commits) <= 20


async def test_a_full_disk_fails_writes_clearly_and_the_store_recovers(tmp_path):
    path = tmp_path / "store.db"
    store = await SqlStore.open(path)
    await store.create_rollouts([spec("before")])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"store.db failed: (disk I/O error|database or disk is full)"):
            await store.create_rollouts([spec("large", "x" * 1_000_000)])
        assert (await store.get_rollout("before")).spec.id == "before"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    await store.create_rollouts([spec("large", "x" * 1_000_000)])
    assert (await store.get_rollout("large")).spec.task.input["text"] == "x" * 1_000_000
    await store.close()


async def test_a_locked_database_fails_writes_clearly_and_the_store_recovers(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    pending = [asyncio.create_task(store.create_rollouts([spec(name)])) for name in "ab"]
    results = await asyncio.gather(*pending, return_exceptions=True)
    assert ["another process holds" in str(result) for result in results] == [True, True]
    other.execute("ROLLBACK")
    other.close()
    await store.create_rollouts([spec("a")])
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.create_rollouts([spec("b")])


async def test_a_conversation_of_many_turns_costs_its_new_tokens_only(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    await store.create_rollouts([spec("r")])
    prompt, parent = list(range(2000)), None
    for turn in range(100):
        await store.add_call(make_call(f"c{turn}", prompt, [turn] * 100, parent=parent))
        prompt, parent = [*prompt, *[turn] * 100, 7, 8], f"c{turn}"
    calls = (await store.calls(["r"]))["r"]
    await store.close()
    assert calls[-1].prompt_ids_P.tolist() == prompt[:-102]
    assert sum(len(call.prompt_ids_P) for call in calls) * 4 > 2_500_000
    assert used_bytes(tmp_path / "store.db") < 200_000


async def test_leases_start_anew_when_the_store_was_away(tmp_path):
    now_s = 1000.0
    store = await SqlStore.open(tmp_path / "store.db", clock=lambda: now_s)
    await store.create_rollouts([spec("r")])
    await store.claim(controller="c", limit=1, lease_s=30)
    await store.close()
    now_s = 5000.0
    store = await SqlStore.open(tmp_path / "store.db", clock=lambda: now_s)
    assert await store.claim(controller="other", limit=1, lease_s=30) == []
    now_s = 5031.0
    assert [rollout.attempt for rollout in await store.claim(controller="other", limit=1, lease_s=30)] == [1]
    await store.close()


async def test_what_a_caller_no_longer_waits_for_is_still_written(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    task = asyncio.create_task(store.create_rollouts([spec("r")]))
    await asyncio.sleep(0)
    task.cancel()
    await store.create_rollouts([spec("next")])
    assert (await store.get_rollout("r")).spec.id == "r"
    await store.close()


async def test_log_probabilities_survive_bit_for_bit(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    await store.create_rollouts([spec("r")])
    logprobs = np.random.default_rng(0).normal(size=500).astype(np.float32)
    await store.add_call(make_call("c", [1], list(range(500)), logprobs=logprobs))
    found = (await store.calls(["r"]))["r"][0].logprobs_R
    await store.close()
    assert found.tobytes() == logprobs.tobytes()


ADD_AND_DIE = """
import asyncio, os, signal, sys
from manege.store.sql import SqlStore
from manege.types import RolloutSpec, Task
from tests.calls import make_call

async def main():
    store = await SqlStore.open(sys.argv[1])
    await store.create_rollouts([RolloutSpec(id="r", run="run", task=Task(id="t", input={}))])
    await store.add_call(make_call("c0", [1, 2], [3]))
    await store.set_delivered("c0", "yes")
    await store.add_call(make_call("c1", [1, 2, 3, 4], [5], parent="c0"))
    await store.add_continued_call(make_call("c2", [6], [7], parent="c1"), 5)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_calls_that_a_killed_process_had_not_indexed_are_read_and_indexed_by_the_next(tmp_path):
    path = tmp_path / "store.db"
    dead = subprocess.run([sys.executable, "-c", ADD_AND_DIE, str(path)], cwd=ROOT)
    assert dead.returncode == -signal.SIGKILL
    expected = [("c0", [1, 2], [3]), ("c1", [1, 2, 3, 4], [5]), ("c2", [1, 2, 3, 4, 5, 6], [7])]

    async def read(store):
        calls = (await store.calls(["r"]))["r"]
        return [(call.id, call.prompt_ids_P.tolist(), call.response_ids_R.tolist()) for call in calls]

    def rows(table):
        with closing(sqlite3.connect(path)) as connection:
            return [row[0] for row in connection.execute(f"SELECT id FROM {table} ORDER BY seq")]

    assert (rows("calls"), rows("raw_calls")) == (["c0"], ["c1", "c2"])
    reader = await StoreReader.open(path)
    assert await read(reader) == expected
    await reader.close()
    store = await SqlStore.open(path)
    async with asyncio.timeout(10):
        while rows("raw_calls"):
            await asyncio.sleep(0.05)
    assert (rows("calls"), await read(store)) == (["c0", "c1", "c2"], expected)
    await store.close()


async def test_a_file_that_another_process_writes_to_is_refused_and_may_be_read(tmp_path):
    path = tmp_path / "store.db"
    store = await SqlStore.open(path)
    with pytest.raises(ConfigError, match="in use by another manege process"):
        await SqlStore.open(path)
    await (await StoreReader.open(path)).close()
    await store.close()
    await (await SqlStore.open(path)).close()


async def test_a_conversation_that_is_rewritten_every_turn_costs_what_it_changes(tmp_path):
    """An agent that drops its reasoning: every prompt begins as the one before, none goes on from its answer."""
    store = await SqlStore.open(tmp_path / "store.db")
    await store.create_rollouts([spec("r")])
    prompt = list(range(2000))
    for turn in range(100):
        await store.add_call(make_call(f"c{turn}", prompt, [-1 - turn, *range(50)]))
        prompt = [*prompt, turn, *range(20)]
    await store.set_delivered("c99", "yes")  # Now all are indexed.
    calls = (await store.calls(["r"]))["r"]
    stored = (await store.stored_calls(["r"]))["r"]
    await store.close()
    assert calls[-1].prompt_ids_P.tolist() == prompt[:-21]
    assert sum(len(each.new_ids_N) for each in stored) == len(prompt) - 21


async def test_a_prompt_shares_with_the_conversation_that_it_belongs_to_also_after_a_restart(tmp_path):
    path = tmp_path / "store.db"
    store = await SqlStore.open(path)
    await store.create_rollouts([spec("r")])
    for turn in range(6):
        for agent in range(3):
            if turn == 3 and agent == 1:
                await store.close()
                store = await SqlStore.open(path)
            prompt = [agent, *range(100), *([agent] * 10 * turn)]
            await store.add_call(make_call(f"c{turn}-{agent}", prompt, [7]))
    await store.set_delivered("c5-2", "yes")
    stored = (await store.stored_calls(["r"]))["r"]
    await store.close()
    assert [len(each.new_ids_N) for each in stored] == [101] * 3 + [10] * 15


async def test_a_damaged_file_fails_reads_and_writes_clearly_and_the_store_recovers(tmp_path):
    path = tmp_path / "store.db"
    store = await SqlStore.open(path)
    await store.create_rollouts([spec(f"r{number}", "x" * 2000) for number in range(200)])
    await store.close()  # Everything is in the file now, nothing in its log.
    whole = path.read_bytes()
    store = await SqlStore.open(path)

    def write(content):
        with path.open("r+b") as file:
            file.write(content)

    page = 4096
    write(whole[: 4 * page] + b"\xab" * (len(whole) - 4 * page))
    with pytest.raises(StoreError, match=r"store.db failed: .*the file is damaged; restore it"):
        await store.list_rollouts(limit=None)
    with pytest.raises(StoreError, match=r"store.db failed"):
        await store.create_rollouts([spec("new", "y" * 20_000)])
    write(whole)
    await store.create_rollouts([spec("new")])
    assert len((await store.list_rollouts(limit=None)).rollouts) == 201
    await store.close()


@pytest.mark.parametrize("wait_s", [0.0, 0.195, 0.2, 0.205, 0.21])
async def test_notes_that_are_being_kept_when_the_store_closes_are_kept(tmp_path, wait_s):
    path = tmp_path / "store.db"
    store = await SqlStore.open(path)
    await store.create_rollouts([spec("r")])
    names = [f"c{number}" for number in range(300)]
    await asyncio.gather(*[store.add_call(make_call(name, [1], [2], delivered="unknown")) for name in names])
    noting = [asyncio.create_task(store.set_delivered(name, "yes")) for name in names]
    await asyncio.sleep(wait_s)
    async with asyncio.timeout(20):
        await store.close()
        await asyncio.gather(*noting)
    reader = await StoreReader.open(path)
    assert {call.delivered for call in (await reader.calls(["r"]))["r"]} == {"yes"}
    await reader.close()


async def test_a_subscriber_that_fails_keeps_nobody_waiting(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    store.subscribe(lambda changes: 1 / 0)
    async with asyncio.timeout(10):
        await store.create_rollouts([spec("a")])
        await store.create_rollouts([spec("b")])
    assert [type(each) for each in failures] == [ZeroDivisionError] * 2
    await store.close()


async def test_nothing_is_remembered_of_rollouts_that_ended(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    for number in range(20):
        name = f"r{number}"
        await store.create_rollouts([spec(name)])
        await store.claim(controller="c", limit=1, lease_s=60)
        await store.add_call(make_call(f"{name}-0", list(range(1000)), [1], rollout=name))
        await store.finish(name, 0, Ending(outcome=Outcome.OK))  # Before its call is indexed.
    await store.set_delivered("r19-0", "yes")
    assert store._indexer._contexts._num_bytes == 0
    await store.close()
