"""The store on a database, through SQLAlchemy Core: SQLite in WAL mode, one writer, readers beside it.

Writes go through the writer (`writer.py`), share commits, and return when they are durable (they survive `kill -9`);
reads (`reading.py`) run beside them and see committed data only. The rules of the states are in `rollouts.py`,
since only the database can decide races: a transition that `TRANSITIONS` does not allow, a second terminal state, or a
write for an attempt that is no longer the current one raises ConflictError. The form of calls is in `calls.py`, what
only one database knows in `dialect.py`.
"""

import asyncio
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Engine, insert, inspect, update
from sqlalchemy.exc import DBAPIError

from manege.errors import ManegeError
from manege.store import calls, rollouts, tables
from manege.store.base import Ending, Run
from manege.store.codec import dumps
from manege.store.dialect import explain, open_engine
from manege.store.reading import StoreReader, check_schema, read_run
from manege.store.writer import Writer
from manege.types import (
    Call,
    CallId,
    Delivered,
    Event,
    JsonObject,
    PolicyVersion,
    Rollout,
    RolloutId,
    RolloutSpec,
    RolloutState,
    RunId,
)

__all__ = ["SqlStore"]

MAX_RUNNING = 1024
"""Running rollouts that are remembered: as many as one gateway serves at once."""

DELIVERY_WAIT_S = 0.05
"""Nobody waits for such a note, but the next call of a busy agent comes in a few milliseconds and must be durable."""

T = TypeVar("T")


class SqlStore(StoreReader):
    """Made by `open`; belongs to the event loop that opened it."""

    def __init__(self, writing: Engine, reading: Engine, url: str | Path, clock: Callable[[], float]) -> None:
        super().__init__(reading, url)
        self._writing = writing
        self._clock = clock
        self._calls = calls.CallWriter()
        self._writer = Writer(writing, url, written=self._calls.forget, committed=self._changed)
        self._running: OrderedDict[RolloutId, Rollout] = OrderedDict()
        self._num_changes = 0

    @classmethod
    async def open(cls, url: str | Path, *, clock: Callable[[], float] = time.time) -> Self:
        """A path, or `sqlite:///path`; made when missing. Raises ConfigError for a schema newer than this code."""
        writing, reading = open_engine(url, writes=True), open_engine(url, writes=False)
        try:
            await asyncio.to_thread(_prepare, writing, url)
        except ManegeError:
            writing.dispose()
            raise
        store = cls(writing, reading, url, clock)
        await store._write(lambda connection: rollouts.grant_leases(connection, clock()))
        return store

    async def close(self) -> None:
        """Finish pending writes and close. Safe to repeat."""
        await self._writer.close()
        await super().close()
        self._writing.dispose()

    async def put_run(self, run_id: RunId, config: JsonObject) -> Run:
        """Create or replace the config of a run."""
        now_s = self._clock()

        def write(connection: Connection) -> Run:
            table, text = tables.runs, dumps(config)
            changed = connection.execute(update(table).where(table.c.id == run_id).values(config=text))
            if changed.rowcount == 0:
                connection.execute(insert(table).values(id=run_id, config=text, created_s=now_s))
            return read_run(connection, run_id)

        return await self._write(write)

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> Sequence[Rollout]:
        """Queue rollouts; an id that exists already is returned as it is. All or nothing."""
        return await self._write(lambda connection: rollouts.create(connection, specs, self._clock()))

    async def get_rollout(self, rollout_id: RolloutId) -> Rollout:
        """Raises NotFoundError. Running ones are remembered, since every model call asks for its own."""
        if rollout := self._running.get(rollout_id):
            self._running.move_to_end(rollout_id)
            return rollout
        num_changes = self._num_changes
        rollout = await super().get_rollout(rollout_id)
        # What was read before a commit that we have learnt of is old.
        if rollout.state is RolloutState.RUNNING and num_changes == self._num_changes:
            self._running[rollout_id] = rollout
            if len(self._running) > MAX_RUNNING:
                self._running.popitem(last=False)
        return rollout

    async def claim(
        self, *, controller: str, limit: int, lease_s: float, holding: Collection[RolloutId] | None = None
    ) -> Sequence[Rollout]:
        """Take queued rollouts (oldest first): queuing -> running under a lease of this controller.
        A running rollout whose lease ran out is taken over as a new attempt, and so is one of this controller that it
        does not say to be `holding`; one with no attempt left is finished as infra_error instead."""
        return await self._write(
            lambda connection: rollouts.claim(connection, controller, limit, lease_s, self._clock(), holding)
        )

    async def start(self, rollout_id: RolloutId, *, evidence: JsonObject) -> Rollout:
        """queuing -> running without a lease, for a controller that has none (Agent Lightning's).
        Raises ConflictError."""
        return await self._write(lambda connection: rollouts.start(connection, rollout_id, evidence, self._clock()))

    async def renew(self, *, controller: str, rollout_ids: Sequence[RolloutId], lease_s: float) -> Sequence[RolloutId]:
        """Prolong leases; returns those that this controller has lost (cancelled, taken over or deleted). With 0 s they
        are given up: back to queuing as a new attempt, which is granted on top of `max_attempts`."""
        return await self._write(
            lambda connection: rollouts.renew(connection, controller, rollout_ids, lease_s, self._clock())
        )

    async def finish(self, rollout_id: RolloutId, attempt: int, ending: Ending) -> Rollout:
        """End an attempt. infra_error with attempts left: back to queuing with attempt + 1. Otherwise the rollout is
        terminal with `reward`, or the outcome's default when None; with `reward_from = "agent"` the last `reward`
        event of this attempt stands in for None. Raises ConflictError for another attempt or a terminal rollout."""
        return await self._write(
            lambda connection: rollouts.finish(connection, rollout_id, attempt, ending, self._clock())
        )

    async def cancel(self, rollout_id: RolloutId) -> Rollout:
        """Terminal at once, outcome cancelled; a terminal rollout is returned as it is."""
        return await self._write(lambda connection: rollouts.cancel(connection, rollout_id, self._clock()))

    async def delete_rollout(self, rollout_id: RolloutId) -> None:
        """Remove a rollout with its calls and events. Raises NotFoundError."""
        await self._write(lambda connection: rollouts.remove(connection, rollout_id))

    async def add_call(self, call: Call) -> None:
        """Keep a call. The prompt is stored as what it adds to its parent. Raises NotFoundError for an unknown rollout,
        ConflictError once its attempt is over."""
        await self._writer.submit_item(self._calls.add, calls.Addition(call=call, num_shared=None))

    async def add_continued_call(self, call: Call, num_shared: int) -> None:
        """The same for a caller that knows the parent's tokens: `call.prompt_ids_P` holds only the ids after the first
        `num_shared`, which are the parent's prompt + response."""
        await self._writer.submit_item(self._calls.add, calls.Addition(call=call, num_shared=num_shared))

    async def set_delivered(self, call_id: CallId, delivered: Delivered) -> None:
        """Note whether the agent got the answer. It waits a moment for a commit that it can share. Raises
        NotFoundError."""
        await self._writer.submit_item(calls.set_delivered, (call_id, delivered), wait_s=DELIVERY_WAIT_S)

    async def add_event(self, event: Event) -> None:
        """Append to a rollout's log. Raises NotFoundError."""

        def write(connection: Connection) -> None:
            rollouts.get(connection, event.rollout_id)
            connection.execute(insert(tables.events).values(**asdict(event) | {"data": dumps(event.data)}))

        await self._write(write)

    async def publish_version(self) -> PolicyVersion:
        """Count one up, durably, and return it."""
        return PolicyVersion(await self._write(lambda connection: rollouts.count_up(connection, "policy_version")))

    async def set_value(self, key: str, value: Any) -> None:
        """Durable, as every write."""

        def write(connection: Connection) -> None:
            table, text = tables.settings, dumps(value)
            changed = connection.execute(update(table).where(table.c.key == key).values(value=text))
            if changed.rowcount == 0:
                connection.execute(insert(table).values(key=key, value=text))

        await self._write(write)

    def _changed(self, changed: frozenset[RolloutId]) -> None:
        self._num_changes += bool(changed)
        for rollout_id in changed:
            self._running.pop(rollout_id, None)

    async def _write(self, operation: Callable[[Connection], T]) -> T:
        return await self._writer.submit(operation)


def _prepare(engine: Engine, url: str | Path) -> None:
    """Make the tables, or check that they are of this code's schema."""
    try:
        with engine.begin() as connection:
            if not inspect(connection).has_table(tables.schema_version.name):
                tables.metadata.create_all(connection)
                connection.execute(insert(tables.schema_version).values(version=tables.SCHEMA_VERSION))
                connection.execute(
                    insert(tables.counters),
                    [{"name": "completion", "value": 0}, {"name": "policy_version", "value": 0}],
                )
            check_schema(connection, url)
    except (DBAPIError, sqlite3.Error) as error:
        raise explain(error, url) from error
