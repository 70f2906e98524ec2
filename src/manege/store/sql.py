"""The store on a database, through SQLAlchemy Core: SQLite or PostgreSQL, one writer, readers beside it.

Writes go through the writer (`writer.py`), share commits, and return when they are durable (they survive `kill -9`);
reads (`reading.py`) run beside them and see committed data only. The rules of the states are in `rollouts.py`,
since only the database can decide races: a transition that `TRANSITIONS` does not allow, a second terminal state, or a
write for an attempt that is no longer the current one raises ConflictError. Calls are written as they come
(`raw_calls.py`) and indexed right after (`indexing.py`); what only one database knows is in `sqlite.py` and
`postgres.py`.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

import orjson
from sqlalchemy import Connection, Engine, delete, insert, select, update
from sqlalchemy.exc import DBAPIError

from manege.errors import ManegeError, StoreError
from manege.logs import get_logger, kv
from manege.store import rollouts, tables
from manege.store.base import EVERYTHING, Changes, Ending, Run
from manege.store.changes import note_key, note_run
from manege.store.codec import dumps
from manege.store.counters import COUNTERS, count_up
from manege.store.dialect import Database, database_of
from manege.store.exports.base import ExportedRollout
from manege.store.imports import import_rollouts
from manege.store.indexing import Indexer, Note
from manege.store.pruning import prune_run
from manege.store.raw_calls import Addition, RawCallWriter
from manege.store.reading import StoreReader, check_schema, read_run, schema_of
from manege.store.rescoring import rescore
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

MAX_RUNNING = 4096
"""Running rollouts that are remembered: as many as one gateway serves at once."""
INDEX_WAIT_S = 0.2
"""Calls are indexed, and notes on them kept, together with those of so much time: nobody waits for that."""

T = TypeVar("T")

_log = get_logger("store")


class SqlStore(StoreReader):
    """Made by `open`; belongs to the event loop that opened it."""

    def __init__(self, database: Database, writing: Engine, clock: Callable[[], float]) -> None:
        super().__init__(database)
        self._writing = writing
        self._clock = clock
        self._raw_calls, self._indexer = RawCallWriter(), Indexer()
        self._writer = Writer(database, writing, forget=self._forget, committed=self._changed)
        self._subscribers: list[Callable[[Changes], None]] = []
        self._running: OrderedDict[RolloutId, Rollout] = OrderedDict()
        self._num_changes = 0
        self._notes: list[tuple[Note, asyncio.Future[None]]] = []
        self._indexing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._listener = database.listen(self._heard)

    @classmethod
    async def open(cls, url: str | Path, *, clock: Callable[[], float] = time.time) -> Self:
        """A path, `sqlite:///path` or `postgresql://user:password@host:port/name`; the tables are made when missing and
        migrated when old. Raises ConfigError for a schema newer than this code, and for an SQLite file that another
        process writes to."""
        database = database_of(url)
        writing = database.writing()
        try:
            await asyncio.to_thread(_prepare, database, writing)
        except ManegeError:
            writing.dispose()
            database.close()
            raise
        store = cls(database, writing, clock)
        await store._write(lambda connection: rollouts.grant_leases(connection, clock()))
        # What a crash left.
        store._index_soon()
        return store

    async def close(self) -> None:
        """Finish pending writes and close. Safe to repeat."""
        if not self._closed:
            self._closed = True
            if self._indexing is not None:
                self._indexing.cancel()
                await asyncio.wait({self._indexing})
            await self._index()
        if self._listener is not None:
            await asyncio.to_thread(self._listener.close)
        await self._writer.close()
        await super().close()
        self._writing.dispose()
        self._database.close()

    @property
    def is_shared(self) -> bool:
        """Whether other gateways may write to the same database."""
        return self._database.is_shared

    def subscribe(self, changed: Callable[[Changes], None]) -> None:
        """Called in the event loop after each commit that changed something, of this store before the writer learns of
        it, and of the other gateways of the database."""
        self._subscribers.append(changed)

    async def put_run(self, run_id: RunId, config: JsonObject) -> Run:
        """Create or replace the config of a run."""
        now_s = self._clock()

        def write(connection: Connection) -> Run:
            table, text = tables.runs, dumps(config)
            note_run(connection, run_id)
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

    async def held(self, *, controller: str, lease_s: float) -> Sequence[Rollout]:
        """What this controller had when it was last heard of, for one that goes on with it; its leases begin anew."""
        return await self._write(lambda connection: rollouts.held(connection, controller, lease_s, self._clock()))

    async def renew(self, *, controller: str, rollout_ids: Sequence[RolloutId], lease_s: float) -> Sequence[RolloutId]:
        """Prolong leases; returns those that this controller has lost (cancelled, taken over or deleted). With 0 s they
        are given up: back to queuing as a new attempt, which is granted on top of `max_attempts`."""
        return await self._write(
            lambda connection: rollouts.renew(connection, controller, rollout_ids, lease_s, self._clock())
        )

    async def finish(self, rollout_id: RolloutId, attempt: int, ending: Ending) -> Rollout:
        """End an attempt. infra_error with attempts left: back to queuing with attempt + 1, claimed again no earlier
        than the ending says. Otherwise the rollout is terminal with `reward`, or the outcome's default when None; with
        `reward_from = "agent"` the last `reward` event of this attempt stands in for None. Raises ConflictError for
        another attempt or a terminal rollout."""
        return await self._write(
            lambda connection: rollouts.finish(connection, rollout_id, attempt, ending, self._clock())
        )

    async def rescore(self, rollout_id: RolloutId, attempt: int, ending: Ending, *, scorer: str) -> Rollout:
        """Change the verdict of a rollout that has ended; the one before stays in its log. `scorer`: what judged.
        Raises ConflictError for one that has not ended or was cancelled, or another attempt than its last."""
        return await self._write(
            lambda connection: rescore(connection, rollout_id, attempt, ending, scorer, self._clock())
        )

    async def cancel(self, rollout_id: RolloutId) -> Rollout:
        """Terminal at once, outcome cancelled; a terminal rollout is returned as it is."""
        return await self._write(lambda connection: rollouts.cancel(connection, rollout_id, self._clock()))

    async def delete_rollout(self, rollout_id: RolloutId) -> None:
        """Remove a rollout with its calls and events. Raises NotFoundError."""
        await self._write(lambda connection: rollouts.remove(connection, rollout_id))

    async def prune_run(self, run_id: RunId) -> int:
        """Delete a run with its rollouts, calls and events, and the space that they took; returns the number of
        rollouts. Raises ConflictError while some have not ended."""

        def write(connection: Connection) -> int:
            number = prune_run(connection, run_id)
            self._indexer.forget(EVERYTHING)
            return number

        number = await self._write(write)
        await asyncio.to_thread(self._database.compact)
        return number

    async def import_rollouts(self, run: Run | None, imported: Sequence[ExportedRollout]) -> None:
        """Put in rollouts of an export as they were; the config of a run that is known stays. All or nothing. Raises
        ConflictError for a rollout, or a place in the order of completion, that is there already."""
        await self._write(lambda connection: import_rollouts(connection, run, imported))
        self._index_soon()

    async def add_call(self, call: Call) -> None:
        """Keep a call; one that is kept already is left as it is. Raises NotFoundError for an unknown rollout,
        ConflictError once its attempt is over."""
        await self._add(Addition(call=call, num_shared=None))

    async def add_continued_call(self, call: Call, num_shared: int) -> None:
        """The same for a caller that knows the parent's tokens: `call.prompt_ids_P` holds only the ids after the first
        `num_shared`, which are the parent's prompt + response."""
        await self._add(Addition(call=call, num_shared=num_shared))

    async def set_delivered(self, call_id: CallId, delivered: Delivered) -> None:
        """Note whether the agent got the answer. It waits a moment for others. Raises NotFoundError."""
        noted = self._loop.create_future()
        self._notes.append(((call_id, delivered), noted))
        self._index_soon()
        await noted

    async def add_event(self, event: Event) -> None:
        """Append to a rollout's log. Raises NotFoundError."""

        def write(connection: Connection) -> None:
            rollouts.get(connection, event.rollout_id)
            connection.execute(insert(tables.events).values(**asdict(event) | {"data": dumps(event.data)}))

        await self._write(write)

    async def publish_version(self) -> PolicyVersion:
        """Count one up, durably, and return it."""
        return PolicyVersion(await self._write(lambda connection: count_up(connection, "policy_version")))

    async def set_value(self, key: str, value: Any) -> None:
        """Durable, as every write."""
        await self.update_value(key, lambda _: value)

    async def update_value(self, key: str, change: Callable[[Any], Any]) -> Any:
        """Set a value to what `change` makes of it (None: unset so far); returns that. What `change` raises is raised,
        and nothing is changed."""

        def write(connection: Connection) -> Any:
            table = tables.settings
            text = connection.execute(select(table.c.value).where(table.c.key == key)).scalar()
            value = change(None if text is None else orjson.loads(text))
            if text is None:
                connection.execute(insert(table).values(key=key, value=dumps(value)))
            else:
                connection.execute(update(table).where(table.c.key == key).values(value=dumps(value)))
            note_key(connection, key)
            return value

        return await self._write(write)

    async def beat(self, gateway_id: str, state: JsonObject) -> None:
        """A gateway's sign of life."""
        seen = {"seen_s": self._clock(), "state": dumps(state)}

        def write(connection: Connection) -> None:
            table = tables.gateways
            if connection.execute(update(table).where(table.c.id == gateway_id).values(**seen)).rowcount == 0:
                connection.execute(insert(table).values(id=gateway_id, **seen))

        await self._write(write)

    async def leave(self, gateway_id: str) -> None:
        """A gateway has ended."""
        table = tables.gateways
        await self._write(lambda connection: connection.execute(delete(table).where(table.c.id == gateway_id)))

    async def _add(self, addition: Addition) -> None:
        await self._writer.submit_item(self._raw_calls.add, addition)
        self._index_soon()

    def _index_soon(self) -> None:
        if not self._closed and (self._indexing is None or self._indexing.done()):
            self._indexing = asyncio.create_task(self._index_later(), name="index-calls")

    async def _index_later(self) -> None:
        await asyncio.sleep(INDEX_WAIT_S)
        while not await self._index():
            await asyncio.sleep(1.0)
        if self._notes:
            self._indexing = None
            self._index_soon()

    async def _index(self) -> bool:
        """Whether all that had come is indexed; what is not stays, and is read, as it came."""
        notes, self._notes = self._notes, []
        try:
            results = await self._write(lambda connection: self._indexer.index(connection, [note for note, _ in notes]))
        except asyncio.CancelledError:
            # Closing: they go with the last ones.
            self._notes[:0] = notes
            raise
        except StoreError as error:
            _log.warning(kv("calls are not indexed yet", error=error))
            results = [error] * len(notes)
        for (_, noted), result in zip(notes, results, strict=True):
            if not noted.done():
                noted.set_exception(result) if result else noted.set_result(None)
        return not any(isinstance(result, StoreError) for result in results)

    def _forget(self, changes: Changes) -> None:
        """In the writer's thread."""
        self._raw_calls.forget(changes)
        self._indexer.forget(changes)

    def _heard(self, changes: Changes) -> None:
        """In the listener's thread."""
        self._loop.call_soon_threadsafe(self._changed, changes)

    def _changed(self, changes: Changes) -> None:
        self._num_changes += 1
        for rollout_id in list(self._running) if changes.everything else changes.rollouts:
            self._running.pop(rollout_id, None)
        for subscriber in self._subscribers:
            subscriber(changes)

    async def _write(self, operation: Callable[[Connection], T]) -> T:
        return await self._writer.submit(operation)


def _prepare(database: Database, engine: Engine) -> None:
    """Make the tables, or those of an older schema anew, or check that they are of this code's."""
    try:
        with engine.begin() as connection:
            database.lock(connection)
            found = schema_of(connection)
            if found is None:
                tables.metadata.create_all(connection)
                connection.execute(insert(tables.version).values(version_num=tables.SCHEMA_VERSION))
                connection.execute(insert(tables.counters), [{"name": name, "value": 0} for name in COUNTERS])
            elif found < tables.SCHEMA_VERSION:
                # Alembic takes longer to import than all else here.
                from manege.store.migrations.migrate import migrate

                _log.info(kv("migrating the database", name=database.name, schema=found, to=tables.SCHEMA_VERSION))
                try:
                    migrate(connection)
                except Exception as error:
                    raise StoreError(
                        f"the database {database.name} could not be brought from schema {found} to "
                        f"{tables.SCHEMA_VERSION} and is as it was: {error!r}"
                    ) from error
            check_schema(connection, database.name)
    except DBAPIError as error:
        raise database.explain(error) from error
