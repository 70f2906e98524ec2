"""The one writer: a thread that puts many pending writes into one commit.

An operation is a function of a connection inside a transaction. Each runs in a savepoint, so that one that raises (a
conflict, an unknown rollout) is undone alone; neighbours that are submitted for the same `many` function run as one.
Futures are resolved only after the commit, so a caller that goes on has a durable write. When the database itself fails
(disk full, locked) the whole group is rolled back and every caller gets StoreError; the next group tries anew, so the
store recovers when the cause goes. A group that finds the database away is held for HOLD_S, and written when it is
back: if its commit was not answered, only after it is known that it did not take place.

Few statements matter more than few rows: around each one the thread gives up the interpreter, and a busy event loop
hands it back late.

Operations run in the order of submission, and their commits become visible in that order; only operations of different
`many` functions may overtake each other within a commit.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from queue import SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from manege.errors import StoreError
from manege.store.base import EVERYTHING, Changes
from manege.store.changes import take_changes
from manege.store.dialect import Database, not_storable

__all__ = ["Many", "Writer"]

MAX_GROUP = 256
"""Operations in one commit: bounds how long the first of them waits for the last."""
HOLD_S = 45.0
"""How long writes wait for a database that is away: agents wait longer than this for an answer."""
_RETRY_S = 0.2

T = TypeVar("T")

Operation = Callable[[Connection], Any]
Many = Callable[[Connection, Sequence[Any]], Sequence[Any]]
"""One result, or exception, per item. No item makes a statement fail."""


@dataclass(frozen=True, slots=True)
class _Pending:
    operation: Operation | None
    """None: `item` is for `many`."""
    future: asyncio.Future[Any]
    many: Many | None = None
    item: Any = None


@dataclass(frozen=True, slots=True)
class _Done:
    """What a transaction did, if it is committed."""

    transaction: str | None
    results: Sequence[tuple[_Pending, Any]]
    """Each operation with its result, or the exception for its caller."""
    changes: Changes


class Writer:
    """Belongs to the event loop that made it."""

    def __init__(
        self,
        database: Database,
        engine: Engine,
        *,
        forget: Callable[[Changes], None],
        committed: Callable[[Changes], None],
    ) -> None:
        """`forget` is called in the writer's thread: what is remembered of these may be wrong, since they were changed,
        here or elsewhere, or a change was undone. `committed` is called in the event loop after each commit, before
        anyone learns of it."""
        self._database, self._engine = database, engine
        self._forget, self._committed = forget, committed
        self._loop = asyncio.get_running_loop()
        self._pending: list[_Pending] = []
        self._is_busy = False
        self._groups: SimpleQueue[list[_Pending] | None] = SimpleQueue()
        self._closed = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="manege-store-writer", daemon=True)
        self._thread.start()

    async def submit(self, operation: Callable[[Connection], T]) -> T:
        """Run an operation and return its result once it is durable. Raises what it raised, or StoreError."""
        return await self._submit(_Pending(operation, self._loop.create_future()), 0.0)

    async def submit_item(self, many: Many, item: Any, *, wait_s: float = 0.0) -> Any:
        """The same for one item of an operation on many, which may wait so long for another one to go with."""
        return await self._submit(_Pending(None, self._loop.create_future(), many, item), wait_s)

    async def _submit(self, pending: _Pending, wait_s: float) -> Any:
        if self._closed:
            raise StoreError("the store is closed; nothing can be written any more")
        self._pending.append(pending)
        if wait_s:
            self._loop.call_later(wait_s, self._wake)
        else:
            self._wake()
        return await pending.future

    async def close(self) -> None:
        """Finish what was submitted and end the thread."""
        if not self._closed:
            self._closed = True
            self._hand_over()
            self._groups.put(None)
        await asyncio.to_thread(self._thread.join)

    def _wake(self) -> None:
        """The thread gets one group at a time, with all that was submitted while it was busy: waking it costs more than
        a row."""
        if self._pending and not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        group, self._pending = self._pending[:MAX_GROUP], self._pending[MAX_GROUP:]
        if group:
            self._groups.put(group)
        if self._closed and self._pending:
            self._hand_over()

    def _run(self) -> None:
        while (group := self._groups.get()) is not None:
            self._loop.call_soon_threadsafe(self._resolve, self._commit(group))
        self._disconnect()

    def _commit(self, group: list[_Pending]) -> _Done:
        """Written, or failed for every caller."""
        give_up_s = time.monotonic() + HOLD_S
        doubtful: _Done | None = None
        while True:
            try:
                connection = self._connection = self._connection or self._engine.connect()
                if doubtful and self._database.is_committed(connection, doubtful.transaction or ""):
                    return doubtful
                doubtful = None
                with connection.begin():
                    done = doubtful = self._transact(connection, group)
                return done
            except Exception as error:
                # The thread must outlive whatever the database does; every caller learns of it.
                self._forget(EVERYTHING)
                self._disconnect()
                # What a connection has cached may be what failed.
                self._engine.dispose()
                doubtful = doubtful if doubtful and doubtful.transaction else None
                if self._closed or time.monotonic() > give_up_s or not self._database.may_pass(error):
                    failure = self._database.explain(error)
                    return _Done(None, [(pending, failure) for pending in group], Changes())
            time.sleep(_RETRY_S)

    def _transact(self, connection: Connection, group: list[_Pending]) -> _Done:
        transaction = self._database.lock(connection)
        if self._database.is_changed(connection):
            self._forget(EVERYTHING)
        results: list[tuple[_Pending, Any]] = []
        for is_single, neighbours in groupby(group, key=lambda pending: pending.operation is not None):
            run = list(neighbours)
            results += _single(connection, run) if is_single else _many(connection, run)
        changes = take_changes(connection)
        self._forget(changes)
        if changes != Changes():
            self._database.announce(connection, changes)
        return _Done(transaction, results, changes)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _resolve(self, done: _Done) -> None:
        try:
            if done.changes != Changes():
                self._committed(done.changes)
        finally:
            for pending, result in done.results:
                if pending.future.done():
                    continue  # The caller gave up waiting; the write stands.
                if isinstance(result, Exception):
                    pending.future.set_exception(result)
                else:
                    pending.future.set_result(result)
            self._is_busy = False
            self._wake()


def _single(connection: Connection, run: list[_Pending]) -> list[tuple[_Pending, Any]]:
    return [(pending, _attempt(connection, pending.operation)) for pending in run if pending.operation is not None]


def _many(connection: Connection, run: list[_Pending]) -> list[tuple[_Pending, Any]]:
    results: list[tuple[_Pending, Any]] = []
    for many in dict.fromkeys(pending.many for pending in run if pending.many is not None):
        same = [pending for pending in run if pending.many == many]
        results += zip(same, many(connection, [pending.item for pending in same]), strict=True)
    return results


def _attempt(connection: Connection, operation: Operation) -> Any:
    """The result, or the exception that belongs to the caller of the operation."""
    connection.exec_driver_sql("SAVEPOINT operation")
    try:
        result = operation(connection)
    except IntegrityError as error:
        result = error
    except DataError as error:
        result = not_storable(error)
    except DBAPIError:
        raise
    except Exception as error:
        # Whatever it is, it belongs to this operation's caller and must not fail its neighbours.
        result = error
    if isinstance(result, Exception):
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT operation")
    connection.exec_driver_sql("RELEASE SAVEPOINT operation")
    return result
