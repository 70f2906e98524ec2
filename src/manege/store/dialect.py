"""What is particular to one database behind one interface, and which one a URL means."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DataError

from manege.errors import ConfigError, StoreError, UnprocessableError
from manege.store.base import Changes

__all__ = ["Database", "Listener", "database_of", "not_storable"]


class Listener(Protocol):
    """Hears what others write."""

    def close(self) -> None:
        """Blocks for a moment. Safe to repeat."""
        ...


class Database(Protocol):
    """One database, open for nothing yet."""

    name: str
    """For people: no password in it."""
    is_shared: bool
    """Whether other processes may write to it at the same time."""

    def writing(self) -> Engine:
        """One connection, for the writer. Raises ConfigError when another process writes where only one may."""
        ...

    def reading(self) -> Engine:
        """Connections that cannot write, whose transactions see one state."""
        ...

    def lock(self, connection: Connection) -> str | None:
        """First in a transaction of the writer: keeps all other writers out until its end. Returns what `is_committed`
        needs; None: a commit that fails here has certainly not happened."""
        ...

    def is_changed(self, connection: Connection) -> bool:
        """Second: whether others have written since the last transaction here."""
        ...

    def is_committed(self, connection: Connection, transaction: str) -> bool:
        """Whether a transaction whose commit was not answered took place."""
        ...

    def announce(self, connection: Connection, changes: Changes) -> None:
        """Last in a transaction of the writer: others hear of the changes when it is committed."""
        ...

    def listen(self, heard: Callable[[Changes], None]) -> Listener | None:
        """Calls `heard`, in a thread, with what others changed; None: there are no others."""
        ...

    def backup(self, target: Path) -> None:
        """A consistent copy, while others write. Raises StoreError."""
        ...

    def compact(self) -> None:
        """Give the space of what was deleted back to the file system, where the database does not do so by itself."""
        ...

    def explain(self, error: Exception) -> StoreError:
        """The cause of a failure of the database itself, and what to do."""
        ...

    def may_pass(self, error: Exception) -> bool:
        """Whether waiting may help: the database is away, and will be back."""
        ...

    def close(self) -> None:
        """Give up the right to write. Safe to repeat."""
        ...


def not_storable(error: DataError) -> UnprocessableError:
    """A value, of whoever asked, that the database has no room for, such as a text with a NUL on PostgreSQL."""
    return UnprocessableError(f"a value cannot be stored or looked for: {error.orig}")


def database_of(url: str | Path) -> Database:
    """A path, `sqlite:///path` or `postgresql://user:password@host:port/name`. Raises ConfigError."""
    from manege.store.sqlite import SqliteDatabase

    try:
        parsed = make_url(url) if isinstance(url, str) and "://" in url else URL.create("sqlite", database=str(url))
    except ArgumentError as error:
        raise ConfigError(f"store {url!r} is neither a path nor a database URL") from error
    match parsed.get_backend_name():
        case "sqlite":
            if parsed.database in (None, "", ":memory:"):
                raise ConfigError("a store in memory would lose acknowledged writes; name a file")
            return SqliteDatabase(Path(str(parsed.database)))
        case "postgresql":
            from manege.store.postgres import PostgresDatabase

            return PostgresDatabase(parsed)
        case other:
            raise ConfigError(
                f"store {parsed.render_as_string()}: {other} is not supported; use a path, sqlite:///path or "
                "postgresql://user@host/name"
            )
