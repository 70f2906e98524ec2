"""The half of the store that only reads: what `SqlStore` can be asked, and all that a look at a run's database needs.

Reads run on connections of their own that cannot write, in threads, each in one transaction that sees committed data of
one moment. They never wait for the writer, nor it for them, so a database can be read while its training goes on. A
read that finds the database away waits for it, as writes do.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, TypeVar

import orjson
from sqlalchemy import ColumnElement, Connection, func, inspect, select
from sqlalchemy.exc import DataError, DBAPIError

from manege.errors import ConfigError, ManegeError, NotFoundError
from manege.store import rollouts, stored_calls, tables
from manege.store.base import GatewayState, RolloutPage, Run, RunStats, StoredCall, TerminalPage
from manege.store.counters import count
from manege.store.dialect import Database, database_of, not_storable
from manege.store.expand import expand
from manege.store.stats import oldest, run_stats
from manege.types import Call, CallId, Event, GroupId, PolicyVersion, Rollout, RolloutId, RolloutState, RunId

__all__ = ["StoreReader", "check_schema", "read_run", "schema_of"]

NUM_READERS = 4
"""Threads that read; SQLite gains nothing from more."""
HOLD_S = 45.0
"""How long a read waits for a database that is away."""
_RETRY_S = 0.2

T = TypeVar("T")


class StoreReader:
    """Made by `open`; belongs to the event loop that opened it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reading = database.reading()
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="manege-store-reader")
        self._closed = False

    @classmethod
    async def open(cls, url: str | Path) -> Self:
        """A store that exists (a path, `sqlite:///path` or `postgresql://...`); nothing is made, changed or locked.
        Raises ConfigError for another schema, StoreError for a file that is missing or no database."""
        reader = cls(database_of(url))
        try:
            await reader._read(lambda connection: check_schema(connection, reader.name), hold_s=0)
        except ManegeError:
            await reader.close()
            raise
        return reader

    @property
    def name(self) -> str:
        """Of the database, for people."""
        return self._database.name

    async def close(self) -> None:
        """Safe to repeat."""
        self._closed = True
        self._readers.shutdown()
        self._reading.dispose()

    async def run_ids(self) -> Sequence[RunId]:
        """Of all rollouts, in the order of their first one."""
        table = tables.rollouts
        statement = select(table.c.run).group_by(table.c.run).order_by(func.min(table.c.seq))
        return await self._read(lambda connection: [RunId(run) for run in connection.execute(statement).scalars()])

    async def get_run(self, run_id: RunId) -> Run:
        """Raises NotFoundError."""
        return await self._read(lambda connection: read_run(connection, run_id))

    async def get_rollout(self, rollout_id: RolloutId) -> Rollout:
        """Raises NotFoundError."""
        return await self._read(lambda connection: rollouts.get(connection, rollout_id))

    async def list_rollouts(
        self,
        *,
        run: RunId | None = None,
        state: RolloutState | Collection[RolloutState] | None = None,
        group: GroupId | None = None,
        since_s: float | None = None,
        until_s: float | None = None,
        after: int = 0,
        limit: int | None = 50,
    ) -> RolloutPage:
        """In the order of creation, from after a cursor on. Times are of creation, seconds since the epoch; `until_s`
        itself is not included."""
        table = tables.rollouts
        conditions: list[ColumnElement[bool]] = [table.c.seq > after, *_matching(run)]
        if state is not None:
            conditions.append(table.c.state.in_([state] if isinstance(state, RolloutState) else state))
        if group is not None:
            conditions.append(table.c.group_id == group)
        if since_s is not None:
            conditions.append(table.c.created_s >= since_s)
        if until_s is not None:
            conditions.append(table.c.created_s < until_s)
        statement = select(table).where(*conditions).order_by(table.c.seq).limit(limit)

        def read(connection: Connection) -> RolloutPage:
            rows = connection.execute(statement).all()
            return RolloutPage(rollouts=rollouts.of_rows(rows), cursor=rows[-1].seq if rows else after)

        return await self._read(read)

    async def count_rollouts(self, *, run: RunId | None = None) -> Mapping[RolloutState, int]:
        """Rollouts per state."""
        table = tables.rollouts
        statement = select(table.c.state, func.count()).where(*_matching(run)).group_by(table.c.state)
        counts = await self._read(lambda connection: connection.execute(statement).all())
        return dict.fromkeys(RolloutState, 0) | {RolloutState(state): number for state, number in counts}

    async def terminal(self, *, run: RunId | None, after: int, limit: int) -> TerminalPage:
        """Rollouts with completion > after, in that order; none is missed, none comes twice."""
        table = tables.rollouts
        statement = select(table).where(table.c.completion > after, *_matching(run))
        statement = statement.order_by(table.c.completion).limit(limit)

        def read(connection: Connection) -> TerminalPage:
            found = rollouts.query(connection, statement)
            cursor = (found[-1].completion or 0) if found else after
            return TerminalPage(rollouts=found, cursor=cursor, num_ended=count(connection, "completion"))

        return await self._read(read)

    async def stored_calls(self, rollout_ids: Sequence[RolloutId]) -> Mapping[RolloutId, Sequence[StoredCall]]:
        """The calls of the last attempt of each rollout as they are kept, in the order in which they were answered."""
        return await self._read(lambda connection: stored_calls.of_rollouts(connection, rollout_ids))

    async def calls(self, rollout_ids: Sequence[RolloutId]) -> Mapping[RolloutId, Sequence[Call]]:
        """The same as whole calls; what their prompts share is in memory once."""
        found = await self.stored_calls(rollout_ids)
        return {rollout_id: expand(calls) for rollout_id, calls in found.items()}

    async def attempt_call_ids(self, rollout_id: RolloutId, attempt: int) -> Sequence[CallId]:
        """The calls of one attempt, in the same order."""
        return await self._read(lambda connection: stored_calls.attempt_ids(connection, rollout_id, attempt))

    async def events(self, rollout_id: RolloutId, *, event_type: str | None = None) -> Sequence[Event]:
        """In the order of insertion."""
        table = tables.events
        columns = [table.c[each.name] for each in fields(Event)]
        statement = select(*columns).where(table.c.rollout_id == rollout_id).order_by(table.c.seq)
        if event_type is not None:
            statement = statement.where(table.c.event_type == event_type)
        rows = await self._read(lambda connection: connection.execute(statement).mappings().all())
        return [Event(**{**row, "data": orjson.loads(row["data"])}) for row in rows]

    async def check_calls(self, rollout_id: RolloutId, attempt: int, call_ids: Collection[CallId]) -> None:
        """Raises UnprocessableError that names the first of them that is no call of this attempt."""
        await self._read(lambda connection: rollouts.check_calls(connection, rollout_id, attempt, call_ids))

    async def policy_version(self) -> PolicyVersion:
        """The last published version; 0 before the first."""
        return PolicyVersion(await self._read(lambda connection: count(connection, "policy_version")))

    async def get_value(self, key: str) -> Any:
        """A small JSON value of ours (keys, registered models); None when unset."""
        statement = select(tables.settings.c.value).where(tables.settings.c.key == key)
        text = await self._read(lambda connection: connection.execute(statement).scalar())
        return None if text is None else orjson.loads(text)

    async def gateways(self) -> Sequence[GatewayState]:
        """The gateways of this database by their last signs of life, also those that are gone."""
        rows = await self._read(lambda connection: connection.execute(select(tables.gateways)).all())
        return [GatewayState(id=row.id, seen_s=row.seen_s, state=orjson.loads(row.state)) for row in rows]

    async def pending(self, *, run: RunId | None = None) -> Mapping[str, float]:
        """Since when the oldest of each kind waits (seconds since the epoch): `queued` and `running` rollouts, and
        `raw_call`, one that is not indexed yet. Kinds of which nothing waits are left out."""
        return await self._read(lambda connection: oldest(connection, run))

    async def run_stats(self, run: RunId) -> RunStats:
        """A run in numbers."""
        return await self._read(lambda connection: run_stats(connection, run))

    async def backup(self, target: Path) -> None:
        """A consistent copy, made while others write: of SQLite a database, of PostgreSQL an archive of pg_dump."""
        await asyncio.get_running_loop().run_in_executor(self._readers, self._database.backup, target)

    async def _read(self, operation: Callable[[Connection], T], *, hold_s: float = HOLD_S) -> T:
        loop, give_up_s = asyncio.get_running_loop(), time.monotonic() + hold_s
        while True:
            try:
                return await loop.run_in_executor(self._readers, self._read_now, operation)
            except DataError as error:
                raise not_storable(error) from error
            except DBAPIError as error:
                # What a connection has cached may be what failed.
                self._reading.dispose()
                if self._closed or time.monotonic() >= give_up_s or not self._database.may_pass(error):
                    raise self._database.explain(error) from error
            await asyncio.sleep(_RETRY_S)

    def _read_now(self, operation: Callable[[Connection], T]) -> T:
        with self._reading.connect() as connection:
            return operation(connection)


def check_schema(connection: Connection, name: str) -> None:
    """Raises ConfigError unless the tables are of this code's schema."""
    found = schema_of(connection)
    if found is None:
        raise ConfigError(f"the database {name} holds nothing of manege's (yet); is it the right one?")
    if found != tables.SCHEMA_VERSION:
        newer = found > tables.SCHEMA_VERSION
        advice = "upgrade manege, or name another one" if newer else "a gateway or a training that opens it migrates it"
        raise ConfigError(
            f"the database {name} has schema {found}, this manege knows schema {tables.SCHEMA_VERSION}; {advice}"
        )


def schema_of(connection: Connection) -> str | None:
    """The schema of the tables; None: there are none."""
    known = inspect(connection)
    if known.has_table(tables.version.name):
        return connection.execute(select(tables.version.c.version_num)).scalar_one()
    # Before Alembic, which calls that schema 0001.
    return "0001" if known.has_table("schema_version") else None


def read_run(connection: Connection, run_id: RunId) -> Run:
    """Raises NotFoundError."""
    row = connection.execute(select(tables.runs).where(tables.runs.c.id == run_id)).one_or_none()
    if row is None:
        raise NotFoundError(f"run {run_id!r} does not exist; put its config first")
    return Run(id=run_id, config=orjson.loads(row.config), created_s=row.created_s)


def _matching(run: RunId | None) -> list[ColumnElement[bool]]:
    """None: any."""
    return [] if run is None else [tables.rollouts.c.run == run]
