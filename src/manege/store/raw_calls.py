"""Calls as they come: written with no more work than an agent should wait for, and indexed right after.

A row holds the arrays as they are and the rest as JSON. Adding a call again is harmless.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, select

from manege.errors import ConflictError, ManegeError, NotFoundError
from manege.store.base import Changes
from manege.store.changes import noted
from manege.store.codec import call_record, dump_bytes, id_bytes
from manege.store.tables import raw_calls, rollouts
from manege.types import TERMINAL, Call, RolloutId

__all__ = ["Addition", "RawCallWriter"]

MAX_OPEN = 4096
"""Attempts that are remembered as open: more than run at once, at some hundred bytes each."""

# Built once: composing a statement costs more than running it.
_ATTEMPT = select(rollouts.c.state, rollouts.c.attempt).where(rollouts.c.id == bindparam("rollout_id"))
# As text and with plain values: SQLAlchemy's own handling of parameters costs more per row than SQLite's insert. A
# group of the writer has fewer values than the 32,766 that SQLite takes in one statement.
_COLUMNS = [column.name for column in raw_calls.columns if column.name != "seq"]
_MARKS = {"sqlite": "?", "postgresql": "%s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """A call to keep."""

    call: Call
    num_shared: int | None
    """Leading tokens that are the parent's prompt + response and that `call.prompt_ids_P` leaves out, because the
    caller knows them; None: the prompt is whole."""


class RawCallWriter:
    """Adds calls, many at a time, without asking the database which attempts are open as long as it knows. Lives in
    the writer's thread."""

    def __init__(self) -> None:
        self._open: OrderedDict[RolloutId, int] = OrderedDict()

    def add(self, connection: Connection, additions: Sequence[Addition]) -> list[ManegeError | None]:
        """Per call: None, NotFoundError for an unknown rollout, ConflictError once its attempt is over."""
        results: list[ManegeError | None] = []
        values: list[Any] = []
        self.forget(noted(connection))
        for addition in additions:
            try:
                self._check_open(connection, addition.call)
                values += _row(addition)
                results.append(None)
            except (ConflictError, NotFoundError) as refusal:
                results.append(refusal)
        if values:
            row = f"({', '.join([_MARKS[connection.dialect.name]] * len(_COLUMNS))})"
            rows = ", ".join([row] * (len(values) // len(_COLUMNS)))
            connection.exec_driver_sql(
                f"INSERT INTO {raw_calls.name} ({', '.join(_COLUMNS)}) VALUES {rows} ON CONFLICT (id) DO NOTHING",
                tuple(values),
            )
        return results

    def forget(self, changes: Changes) -> None:
        """These rollouts may have changed their state."""
        if changes.everything:
            self._open.clear()
        for rollout_id in changes.rollouts:
            self._open.pop(rollout_id, None)

    def _check_open(self, connection: Connection, call: Call) -> None:
        if self._open.get(call.rollout_id) == call.attempt:
            return
        row = connection.execute(_ATTEMPT, {"rollout_id": call.rollout_id}).one_or_none()
        if row is None:
            raise NotFoundError(f"rollout {call.rollout_id!r} of call {call.id} does not exist")
        if row.state in TERMINAL or row.attempt != call.attempt:
            raise ConflictError(
                f"call {call.id}: attempt {call.attempt} of rollout {call.rollout_id} is over ({row.state})"
            )
        self._open[call.rollout_id] = call.attempt
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)


def _row(addition: Addition) -> tuple[Any, ...]:
    call = addition.call
    return (
        call.id,
        call.rollout_id,
        call.attempt,
        addition.num_shared,
        id_bytes(call.prompt_ids_P),
        id_bytes(call.response_ids_R),
        call.logprobs_R.astype("<f4", copy=False).tobytes(),
        dump_bytes(call_record(call)),
    )
