"""SQLite: one file, one process that writes, any number that read.

Durability: WAL with synchronous=FULL, so that a commit survives `kill -9` and a power cut. The writer takes the write
lock when its transaction begins, so that no statement in it can fail for want of the lock.
"""

import fcntl
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event

from manege.errors import ConfigError, StoreError
from manege.store.base import Changes

__all__ = ["SqliteDatabase"]

BUSY_TIMEOUT_MS = 5000
"""How long a writer waits for another process that holds the database."""
NUM_READERS = 8

_ADVICE = {
    "SQLITE_FULL": "the disk is full; free some space and go on, nothing that was acknowledged is lost",
    "SQLITE_BUSY": "another process holds the database; end it or wait",
    "SQLITE_READONLY": "the file is read-only; check its permissions",
    "SQLITE_CANTOPEN": "the file cannot be opened; check that its folder exists and may be written",
    "SQLITE_NOTADB": "the file is not an SQLite database; name another one",
    "SQLITE_CORRUPT": "the file is damaged; restore it or name another one",
}


class SqliteDatabase:
    """See `dialect.Database`."""

    is_shared = False

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._lock: int | None = None

    def writing(self) -> Engine:
        self._take_lock()
        return _engine(URL.create("sqlite", database=self.name), writes=True)

    def reading(self) -> Engine:
        # Such connections cannot write, and do not make a file that is missing. https://www.sqlite.org/uri.html
        url = URL.create("sqlite", database=f"file:{quote(self.name)}", query={"mode": "ro", "uri": "true"})
        return _engine(url, writes=False)

    def lock(self, connection: Connection) -> None:
        return None

    def is_changed(self, connection: Connection) -> bool:
        return False

    def is_committed(self, connection: Connection, transaction: str) -> bool:
        return False

    def announce(self, connection: Connection, changes: Changes) -> None:
        pass

    def listen(self, heard: Callable[[Changes], None]) -> None:
        return None

    def backup(self, target: Path) -> None:
        reading = self.reading()
        try:
            with reading.connect() as connection, closing(sqlite3.connect(target)) as copy:
                driver = connection.connection.driver_connection
                assert isinstance(driver, sqlite3.Connection)
                driver.backup(copy)
        except sqlite3.Error as error:
            raise self.explain(error) from error
        finally:
            reading.dispose()

    def compact(self) -> None:
        try:
            with closing(sqlite3.connect(self.name, timeout=BUSY_TIMEOUT_MS / 1000)) as connection:
                connection.execute("VACUUM")
        except sqlite3.Error as error:
            raise self.explain(error) from error

    def explain(self, error: Exception) -> StoreError:
        cause = getattr(error, "orig", None) or error
        name = getattr(cause, "sqlite_errorname", "")
        # Extended names begin with the primary one: SQLITE_IOERR_WRITE, SQLITE_BUSY_SNAPSHOT.
        advice = next(
            (text for key, text in _ADVICE.items() if name.startswith(key)), "see the disk and its permissions"
        )
        return StoreError(f"the database {self.name} failed: {cause} ({name or type(cause).__name__}); {advice}")

    def may_pass(self, error: Exception) -> bool:
        return False

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        """The lock dies with its holder, however that dies. What a writer remembers of the database would be wrong if
        another one changed it."""
        try:
            self._lock = os.open(self.name + ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            return  # Nor can the database be written there: its own error says more.
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(
                f"the database {self.name} is in use by another manege process; end it, name another file, or share a "
                "PostgreSQL database"
            ) from error


def _engine(url: URL, *, writes: bool) -> Engine:
    engine = create_engine(url, pool_size=1 if writes else NUM_READERS, max_overflow=0)
    begin = "BEGIN IMMEDIATE" if writes else "BEGIN"

    # Python's driver would begin transactions by itself, and not before SAVEPOINT.
    # https://docs.sqlalchemy.org/en/20/dialects/sqlite.html#pysqlite-serializable
    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        if writes:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
