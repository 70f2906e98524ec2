"""The one writer: a thread that puts many pending writes into one commit.

An operation is a function of a connection inside a transaction. Each runs in a savepoint, so that one that raises (a
conflict, an unknown rollout, a duplicate) is undone alone. Futures are resolved only after the commit, so a caller that
goes on has a durable write. When the database itself fails (disk full, locked) the whole group is rolled back and every
caller gets StoreError; the next group tries anew, so the store recovers when the cause goes.

Operations run in the order of submission, and their commits become visible in that order.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError

from manege.errors import StoreError
from manege.store.dialect import explain

__all__ = ["Writer"]

MAX_GROUP = 256
"""Operations in one commit: bounds how long the first of them waits for the last."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Pending:
    operation: Callable[[Connection], Any]
    future: asyncio.Future[Any]


class Writer:
    """Belongs to the event loop that made it."""

    def __init__(self, engine: Engine, url: str | Path) -> None:
        self._engine = engine
        self._url = url
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Pending | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="manege-store-writer", daemon=True)
        self._thread.start()

    async def submit(self, operation: Callable[[Connection], T]) -> T:
        """Run an operation and return its result once it is durable. Raises what it raised, or StoreError."""
        if self._closed:
            raise StoreError("the store is closed; nothing can be written any more")
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Pending(operation, future))
        return await future

    async def close(self) -> None:
        """Finish what was submitted and end the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            group, last = [first], False
            while len(group) < MAX_GROUP and not last:
                try:
                    pending = self._queue.get_nowait()
                except Empty:
                    break
                if pending is None:
                    last = True
                else:
                    group.append(pending)
            results = self._commit(group)
            self._loop.call_soon_threadsafe(_resolve, group, results)
            if last:
                return

    def _commit(self, group: list[_Pending]) -> list[Any]:
        """The result of each operation, or the exception for its caller."""
        try:
            with self._engine.begin() as connection:
                return [_attempt(connection, pending.operation) for pending in group]
        except Exception as error:
            # The thread must outlive whatever the database does; every caller learns of it.
            return [explain(error, self._url)] * len(group)


def _attempt(connection: Connection, operation: Callable[[Connection], Any]) -> Any:
    connection.exec_driver_sql("SAVEPOINT operation")
    try:
        result = operation(connection)
    except DBAPIError as error:
        if not isinstance(error, IntegrityError):
            raise
        result = error
    except Exception as error:
        # Whatever it is, it belongs to this operation's caller and must not fail its neighbours.
        result = error
    if isinstance(result, Exception):
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT operation")
    connection.exec_driver_sql("RELEASE SAVEPOINT operation")
    return result


def _resolve(group: list[_Pending], results: list[Any]) -> None:
    for pending, result in zip(group, results, strict=True):
        if pending.future.done():
            continue  # The caller gave up waiting; the write stands.
        if isinstance(result, Exception):
            pending.future.set_exception(result)
        else:
            pending.future.set_result(result)
