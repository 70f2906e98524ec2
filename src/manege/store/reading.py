"""The half of the store that only reads: what `SqlStore` can be asked, and all that a look at a run's folder needs.

Reads run on connections of their own that cannot write, in threads, and see committed data only. They never wait for
the writer, nor it for them (SQLite's WAL), so a folder can be read while its training goes on.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, TypeVar

import orjson
from sqlalchemy import ColumnElement, Connection, Engine, func, inspect, select
from sqlalchemy.exc import DBAPIError

from manege.errors import ConfigError, ManegeError, NotFoundError
from manege.store import calls, rollouts, tables
from manege.store.base import Run, TerminalPage
from manege.store.dialect import explain, open_engine
from manege.types import Call, CallId, Event, PolicyVersion, Rollout, RolloutId, RolloutState, RunId

__all__ = ["StoreReader", "check_schema", "read_run"]

NUM_READERS = 4
"""Threads that read; SQLite gains nothing from more."""

T = TypeVar("T")


class StoreReader:
    """Made by `open`; belongs to the event loop that opened it."""

    def __init__(self, reading: Engine, url: str | Path) -> None:
        self._reading = reading
        self._url = url
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="manege-store-reader")

    @classmethod
    async def open(cls, url: str | Path) -> Self:
        """A store that exists; nothing is made, changed or locked. Raises ConfigError for another schema, StoreError
        for a file that is missing or no database."""
        reader = cls(open_engine(url, writes=False), url)
        try:
            await reader._read(lambda connection: check_schema(connection, url))
        except ManegeError:
            await reader.close()
            raise
        return reader

    async def close(self) -> None:
        """Safe to repeat."""
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
        self, *, run: RunId | None = None, state: RolloutState | None = None, limit: int = 50, offset: int = 0
    ) -> Sequence[Rollout]:
        """Oldest first."""
        table = tables.rollouts
        statement = select(table).where(*_matching(run, state)).order_by(table.c.seq).limit(limit).offset(offset)
        return await self._read(lambda connection: rollouts.query(connection, statement))

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
            return TerminalPage(rollouts=found, cursor=cursor, num_ended=rollouts.count(connection, "completion"))

        return await self._read(read)

    async def calls(self, rollout_ids: Sequence[RolloutId]) -> Mapping[RolloutId, Sequence[Call]]:
        """The calls of the last attempt of each rollout, in the order in which they were answered."""
        return await self._read(lambda connection: calls.of_rollouts(connection, rollout_ids))

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
        return PolicyVersion(await self._read(lambda connection: rollouts.count(connection, "policy_version")))

    async def get_value(self, key: str) -> Any:
        """A small JSON value of ours (keys, registered models); None when unset."""
        statement = select(tables.settings.c.value).where(tables.settings.c.key == key)
        text = await self._read(lambda connection: connection.execute(statement).scalar())
        return None if text is None else orjson.loads(text)

    async def _read(self, operation: Callable[[Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read_now, operation)

    def _read_now(self, operation: Callable[[Connection], T]) -> T:
        try:
            with self._reading.connect() as connection:
                return operation(connection)
        except DBAPIError as error:
            raise explain(error, self._url) from error


def check_schema(connection: Connection, url: str | Path) -> None:
    """Raises ConfigError unless the tables are of this code's schema."""
    if not inspect(connection).has_table(tables.schema_version.name):
        raise ConfigError(f"the database {url} holds nothing of manege's (yet); is it the right file?")
    version = connection.execute(select(tables.schema_version.c.version)).scalar_one()
    if version != tables.SCHEMA_VERSION:
        raise ConfigError(
            f"the database {url} has schema {version}, this manege knows schema {tables.SCHEMA_VERSION}; "
            "upgrade manege, or name another file"
        )


def read_run(connection: Connection, run_id: RunId) -> Run:
    """Raises NotFoundError."""
    row = connection.execute(select(tables.runs).where(tables.runs.c.id == run_id)).one_or_none()
    if row is None:
        raise NotFoundError(f"run {run_id!r} does not exist; put its config first")
    return Run(id=run_id, config=orjson.loads(row.config), created_s=row.created_s)


def _matching(run: RunId | None, state: RolloutState | None = None) -> list[ColumnElement[bool]]:
    """None: any."""
    table = tables.rollouts
    conditions = [] if run is None else [table.c.run == run]
    return conditions if state is None else [*conditions, table.c.state == state]
