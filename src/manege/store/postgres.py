"""PostgreSQL: several gateways on one database.

Writers take turns: each transaction of a writer holds one advisory lock, so that, as on SQLite, what is checked cannot
change before it is written, and numbers of completion become visible in their order. What a commit changed is announced
with NOTIFY; a counter of such commits, read under the lock, tells a writer for certain whether others wrote since.
"""

import os
import shutil
import subprocess
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import URL, Connection, Engine, create_engine
from sqlalchemy.exc import DBAPIError

from manege.errors import ConfigError, StoreError
from manege.store.base import EVERYTHING, Changes
from manege.store.counters import count, count_up
from manege.types import RolloutId, RunId

try:
    import psycopg
except ImportError as error:
    raise ConfigError(
        "a PostgreSQL store needs the driver psycopg: pip install 'manege[postgres]', or use a path for SQLite"
    ) from error

__all__ = ["PostgresDatabase"]

NUM_READERS = 4
CONNECT_TIMEOUT_S = 5
LOCK_TIMEOUT_MS = 10_000
"""How long a writer waits for the others; then it tries again."""
IDLE_TIMEOUT_MS = 20_000
"""A writer that hangs or was cut off holds up the others no longer than this."""
MAX_NOTICE_BYTES = 7900
"""Of one NOTIFY: https://www.postgresql.org/docs/current/sql-notify.html"""
RELISTEN_S = 0.5
"""After a lost connection."""
CLOSED_POLL_S = 0.1
"""How long `close` waits for the listener at most."""

_CHANNEL = "manege"
_LOCK_KEY = 0x6D616E6567  # "maneg": any number that is always the same
_CHANGES = "changes"
_AWAY = ("08", "57P", "53300", "55P03", "25006")
"""SQLSTATEs (or their beginnings) after which waiting may help: connection lost, shutting down or starting, too many
connections, lock not available, read-only while another server takes over.
https://www.postgresql.org/docs/current/errcodes-appendix.html"""


class PostgresDatabase:
    """See `dialect.Database`."""

    is_shared = True

    def __init__(self, url: URL) -> None:
        self.name = url.render_as_string()
        self._url = url.set(drivername="postgresql+psycopg")
        self._writer = uuid.uuid4().hex[:12]
        self._num_seen = -1

    def writing(self) -> Engine:
        return self._engine(
            1, f"-c lock_timeout={LOCK_TIMEOUT_MS} -c idle_in_transaction_session_timeout={IDLE_TIMEOUT_MS}"
        )

    def reading(self) -> Engine:
        return self._engine(
            NUM_READERS, "-c default_transaction_read_only=on -c default_transaction_isolation=repeatable\\ read"
        )

    def lock(self, connection: Connection) -> str:
        statement = f"SELECT pg_advisory_xact_lock({_LOCK_KEY}), pg_current_xact_id()::text"
        return connection.exec_driver_sql(statement).one()[1]

    def is_changed(self, connection: Connection) -> bool:
        # A statement of its own, since one sees what was committed when it began, which is before it got the lock.
        value = count(connection, _CHANGES)
        is_changed, self._num_seen = value != self._num_seen, value
        return is_changed

    def is_committed(self, connection: Connection, transaction: str) -> bool:
        # The lock waits for a server process that has not seen yet that its client is gone.
        with connection.begin():
            self.lock(connection)
            status = connection.exec_driver_sql("SELECT pg_xact_status(%s::text::xid8)", (transaction,)).scalar()
        return status == "committed"

    def announce(self, connection: Connection, changes: Changes) -> None:
        notice = {
            "by": self._writer,
            "rollouts": sorted(changes.rollouts),
            "runs": sorted(changes.runs),
            "keys": sorted(changes.keys),
        }
        text = orjson.dumps(notice)
        if len(text) > MAX_NOTICE_BYTES or changes.everything:
            text = orjson.dumps({"by": self._writer})
        connection.exec_driver_sql("SELECT pg_notify(%s, %s)", (_CHANNEL, text.decode()))
        # If this is undone, the next transaction takes it for another's: it then forgets what it need not.
        self._num_seen = count_up(connection, _CHANGES)

    def listen(self, heard: Callable[[Changes], None]) -> "_PostgresListener":
        return _PostgresListener(self._plain_url(), self._writer, heard)

    def backup(self, target: Path) -> None:
        program = shutil.which("pg_dump")
        if program is None:
            raise StoreError("pg_dump is not installed here; it comes with PostgreSQL's client programs")
        command = [program, "--format=custom", f"--file={target}", "--dbname", self._plain_url(password=False)]
        password = {} if self._url.password is None else {"PGPASSWORD": str(self._url.password)}
        ended = subprocess.run(command, env={**os.environ, **password}, capture_output=True, text=True)
        if ended.returncode:
            raise StoreError(f"pg_dump of {self.name} failed: {ended.stderr.strip()}")

    def compact(self) -> None:
        pass

    def explain(self, error: Exception) -> StoreError:
        cause = getattr(error, "orig", None) or error
        state = getattr(cause, "sqlstate", None)
        if state == "53100":
            advice = "its disk is full; free some space and go on, nothing that was acknowledged is lost"
        elif self.may_pass(error):
            advice = "is it running, and is its address right?"
        else:
            advice = "see its log"
        text = " ".join(str(cause).split())
        return StoreError(f"the database {self.name} failed: {text} ({state or type(cause).__name__}); {advice}")

    def may_pass(self, error: Exception) -> bool:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if not isinstance(cause, psycopg.Error):
            return False
        # A connection that broke without a word has no SQLSTATE.
        return isinstance(cause, psycopg.OperationalError) and (cause.sqlstate or "08").startswith(_AWAY)

    def close(self) -> None:
        pass

    def _engine(self, size: int, options: str) -> Engine:
        alive: dict[str, Any] = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
        options = f"{self._url.query.get('options', '')} {options}".strip()
        return create_engine(
            self._url.difference_update_query(["options"]),
            pool_size=size,
            max_overflow=0,
            pool_pre_ping=True,
            connect_args={"connect_timeout": CONNECT_TIMEOUT_S, "options": options, **alive},
        )

    def _plain_url(self, *, password: bool = True) -> str:
        url = self._url.set(drivername="postgresql")
        return (url if password else url.set(password=None)).render_as_string(hide_password=False)


class _PostgresListener:
    """A thread with a connection of its own."""

    def __init__(self, url: str, writer: str, heard: Callable[[Changes], None]) -> None:
        self._url, self._writer, self._heard = url, writer, heard
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manege-store-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with psycopg.connect(self._url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S) as connection:
                    connection.execute(f"LISTEN {_CHANNEL}")
                    # What was said before is lost.
                    self._heard(EVERYTHING)
                    while not self._closed.is_set():
                        for notice in connection.notifies(timeout=CLOSED_POLL_S):
                            self._hear(notice.payload)
            except psycopg.Error:
                self._closed.wait(RELISTEN_S)

    def _hear(self, payload: str) -> None:
        notice = orjson.loads(payload)
        if notice["by"] == self._writer:
            return
        if "rollouts" not in notice:
            self._heard(EVERYTHING)
            return
        self._heard(
            Changes(
                rollouts=frozenset(map(RolloutId, notice["rollouts"])),
                runs=frozenset(map(RunId, notice["runs"])),
                keys=frozenset(notice["keys"]),
            )
        )
