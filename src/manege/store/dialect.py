"""Everything that is particular to one database; today SQLite.

Durability: WAL with synchronous=FULL, so that a commit survives `kill -9` and a power cut. The writer takes the write
lock when its transaction begins, so that no statement in it can fail for want of the lock.
"""

from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from manege.errors import ConfigError, StoreError

__all__ = ["explain", "open_engine"]

BUSY_TIMEOUT_MS = 5000
"""How long a writer waits for another process that holds the database."""

_ADVICE = {
    "SQLITE_FULL": "the disk is full; free some space and go on, nothing that was acknowledged is lost",
    "SQLITE_BUSY": "another process holds the database; end it or wait",
    "SQLITE_READONLY": "the file is read-only; check its permissions",
    "SQLITE_CANTOPEN": "the file cannot be opened; check that its folder exists and may be written",
    "SQLITE_NOTADB": "the file is not an SQLite database; name another one",
    "SQLITE_CORRUPT": "the file is damaged; restore it or name another one",
}


def open_engine(url: str | Path, *, writes: bool) -> Engine:
    """Connections for the writer, or for readers. Raises ConfigError for a database that we do not support."""
    try:
        parsed = make_url(url) if isinstance(url, str) and "://" in url else URL.create("sqlite", database=str(url))
    except ArgumentError as error:
        raise ConfigError(f"store {url!r} is neither a path nor a database URL") from error
    if parsed.get_backend_name() != "sqlite":
        raise ConfigError(f"store {parsed.render_as_string()} is not supported; use a path or sqlite:///path")
    if parsed.database in (None, "", ":memory:"):
        raise ConfigError("a store in memory would lose acknowledged writes; name a file")
    if not writes:
        # Such connections cannot write, and do not make a file that is missing. https://www.sqlite.org/uri.html
        parsed = parsed.set(database=f"file:{quote(str(parsed.database))}", query={"mode": "ro", "uri": "true"})
    engine = create_engine(parsed, pool_size=1 if writes else 8, max_overflow=0)
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


def explain(error: Exception, url: str | Path) -> StoreError:
    """The cause of a failure of the database itself, and what to do."""
    cause = getattr(error, "orig", None) or error
    name = getattr(cause, "sqlite_errorname", "")
    # Extended names begin with the primary one: SQLITE_IOERR_WRITE, SQLITE_BUSY_SNAPSHOT.
    advice = next((text for key, text in _ADVICE.items() if name.startswith(key)), "see the disk and its permissions")
    return StoreError(f"the database {url} failed: {cause} ({name or type(cause).__name__}); {advice}")
