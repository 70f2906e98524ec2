"""Databases as earlier schemas wrote them, brought to the newest one, on both databases."""

import gzip
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, delete, insert, select

from manege.errors import ConfigError, StoreError
from manege.store import migrations, tables
from manege.store.dialect import database_of
from manege.store.migrations.migrate import migrate
from manege.store.reading import StoreReader
from manege.store.sql import SqlStore
from manege.types import Delivered, FinishReason, Outcome, RolloutState, VersionSpan

pytestmark = pytest.mark.anyio

GOLDEN = Path(__file__).parent.parent / "golden"


def old_sqlite(path, version):
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(gzip.decompress((GOLDEN / f"store-{version}.sql.gz").read_bytes()).decode())


def write_old(url, version, tmp_path):
    """The same rows wherever: SQLite's dump as it is, PostgreSQL from tables that its own migration made."""
    if isinstance(url, Path):
        old_sqlite(url, version)
        return
    old_sqlite(tmp_path / "old.db", version)
    source, target = database_of(tmp_path / "old.db").reading(), database_of(url).writing()
    with source.connect() as reading, target.begin() as writing:
        migrate(writing, to=f"{version:04}")
        known = MetaData()
        known.reflect(reading)
        for table in known.sorted_tables:
            rows = [dict(row) for row in reading.execute(select(table)).mappings()]
            writing.execute(delete(table))  # what its migration put in
            if rows:
                writing.execute(insert(table), rows)
    source.dispose()
    target.dispose()


async def test_a_database_of_schema_1_is_brought_to_the_newest_with_all_it_holds(url, tmp_path):
    write_old(url, 1, tmp_path)
    with pytest.raises(ConfigError, match=r"has schema 0001, this manege knows schema \d+; .* migrates it"):
        await StoreReader.open(url)
    store = await SqlStore.open(url)
    page = await store.list_rollouts(group="g")
    found = {rollout.spec.id: rollout for rollout in page.rollouts}
    assert list(found) == ["done", "retried", "running", "cancelled", "queued"]
    done = found["done"]
    assert (done.state, done.outcome, done.reward, done.message) == (RolloutState.SUCCEEDED, Outcome.OK, 0.75, "m")
    assert (done.spec.task.input, done.spec.task.hidden, done.evidence) == ({"q": "ü"}, {"a": 1}, {"exit_code": 0})
    assert (found["retried"].attempt, found["retried"].outcome) == (1, Outcome.AGENT_ERROR)
    ended = (await store.terminal(run="old", after=0, limit=9)).rollouts
    assert [rollout.spec.id for rollout in ended] == ["done", "retried", "cancelled", "val"]

    calls = (await store.calls(["done"]))["done"]
    assert [(call.id, call.prompt_ids_P.tolist(), call.response_ids_R.tolist()) for call in calls] == [
        ("c1", [1, 2, 3], [4]),
        ("c2", [1, 2, 3, 4, 5, 6], [7, 8]),
        ("c3", [1, 2, 3, 4, 5, 6, 7, 8, 9], [10]),
        ("c4", [1, 2, 30], [40]),
        ("c5", [], []),
    ]
    c1, c2, c3, c4, c5 = calls
    assert c2.logprobs_R.tolist() == [0.0, -0.125]
    assert c2.spans == [VersionSpan(first_token=0, version=3), VersionSpan(first_token=1, version=4)]
    assert (c1.delivered, c4.delivered) == (Delivered.YES, Delivered.NO)
    assert (c4.constrained, c4.finish_reason, c5.flaw) == (True, FinishReason.LENGTH, "no ids")
    assert (c3.parent, c3.thread, c3.edits, c3.headers) == ("c2", "side:title", ["a line"], {"user-agent": "x/1"})
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    assert c3.request == {"model": "m", "messages": [{"role": "user", "content": "hé c3"}], "tools": tools}
    assert c3.reply == {"role": "assistant", "content": "ok c3"}
    assert [call.id for call in (await store.calls(["retried"]))["retried"]] == ["r1"]

    assert [event.event_type for event in await store.events("done")] == ["note", "call_reward"]
    assert (await store.policy_version(), await store.get_value("models")) == (3, [])
    assert (await store.get_run("old")).config == {"name": "old", "sampling": {"temperature": 1.0}}
    # And it goes on.
    assert [rollout.spec.id for rollout in await store.claim(controller="c", limit=9, lease_s=9)] == ["queued"]
    assert (await store.cancel("running")).completion == 5
    await store.close()
    again = await SqlStore.open(url)
    assert len((await again.calls(["done"]))["done"]) == 5
    await again.close()


async def test_a_database_of_schema_2_is_brought_to_the_newest_and_its_failed_rollout_is_tried_at_once(url, tmp_path):
    write_old(url, 2, tmp_path)
    store = await SqlStore.open(url)
    (waiting,) = (await store.list_rollouts(run="new")).rollouts
    assert (waiting.state, waiting.attempt, waiting.message) == (RolloutState.QUEUING, 1, "node died")
    assert [call.id for call in (await store.calls(["done"]))["done"]] == ["c1", "c2", "c3", "c4", "c5"]
    assert [rollout.spec.id for rollout in await store.claim(controller="c", limit=9, lease_s=9)] == ["waiting"]
    await store.close()


async def test_migrated_tables_are_those_that_the_code_would_make(url):
    engine = database_of(url).writing()
    with engine.begin() as connection:
        migrate(connection)
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
    engine.dispose()


def test_there_is_one_migration_per_schema_and_a_database_of_each_older_one():
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    revisions = [script.revision for script in scripts.walk_revisions()][::-1]
    assert revisions == [f"{number:04}" for number in range(1, len(revisions) + 1)]
    assert revisions[-1] == tables.SCHEMA_VERSION
    for number in range(1, len(revisions)):
        assert (GOLDEN / f"store-{number}.sql.gz").exists()


async def test_a_migration_that_fails_changes_nothing(tmp_path):
    path = tmp_path / "store.db"
    old_sqlite(path, 1)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE calls SET record = 'no JSON' WHERE id = 'r1'")
        connection.commit()
        before = list(connection.iterdump())
    with pytest.raises(StoreError, match=r"from schema 0001 to 0003 and is as it was: JSONDecodeError"):
        await SqlStore.open(path)
    with closing(sqlite3.connect(path)) as connection:
        assert list(connection.iterdump()) == before
