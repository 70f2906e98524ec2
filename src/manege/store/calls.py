"""Calls in the database, each as what it adds to its parent.

A child's prompt starts with its parent's prompt + response, so only what follows is stored, with the number of shared
tokens. Whether it does start so is checked by length and hash, without reading the ancestors; if it does not, the
prompt is stored whole. A rollout of T turns thus costs O(T) tokens, and reading it rebuilds parents before children:

    call 1: shared 0, prompt [1 2 3], response [4]      -> prompt [1 2 3]
    call 2: parent 1, shared 4, prompt [5 6], ...       -> prompt [1 2 3 4 5 6]
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from sqlalchemy import Connection, Row, and_, bindparam, select

from manege.errors import ConflictError, ManegeError, NotFoundError
from manege.store.changes import changed_rollouts
from manege.store.codec import call_record, dumps, floats, ids, make_call
from manege.store.tables import calls, rollouts
from manege.types import TERMINAL, Call, CallId, Delivered, IntArray, RolloutId

__all__ = ["Addition", "CallWriter", "of_rollouts", "set_delivered"]

MAX_KNOWN = 4096
"""Attempts and contexts that the writer remembers: more than run at once, at some hundred bytes each."""

# Built once: composing a statement costs more than running it.
_ATTEMPT = select(rollouts.c.state, rollouts.c.attempt).where(rollouts.c.id == bindparam("rollout_id"))
_PARENT = select(calls.c.context_len, calls.c.context_hash).where(
    calls.c.id == bindparam("parent"),
    calls.c.rollout_id == bindparam("rollout_id"),
    calls.c.attempt == bindparam("attempt"),
)
_OF_ROLLOUT = (
    select(calls)
    .join(rollouts, and_(calls.c.rollout_id == rollouts.c.id, calls.c.attempt == rollouts.c.attempt))
    .where(rollouts.c.id == bindparam("rollout_id"))
    .order_by(calls.c.seq)
)
_COLUMNS = [column.name for column in calls.columns if column.name != "seq"]
# As text and with plain values: SQLAlchemy's own handling of parameters costs more per row than SQLite's insert. A
# group of the writer has fewer values than the 32,766 that SQLite takes in one statement.
_INSERT = f"INSERT INTO {calls.name} ({', '.join(_COLUMNS)}) VALUES "
_ROW = f"({', '.join('?' * len(_COLUMNS))})"
_SET_DELIVERED = f"UPDATE {calls.name} SET delivered = ? WHERE id IN "


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """A call to keep."""

    call: Call
    num_shared: int | None
    """Leading tokens that are the parent's prompt + response and that `call.prompt_ids_P` leaves out, because the
    caller knows them; None: the prompt is whole, and the parent's tokens are looked for in it."""


class CallWriter:
    """Adds calls, many at a time, without asking the database what the one writer knows already: which attempts are
    open, and what contexts recent calls have. Lives in the writer's thread."""

    def __init__(self) -> None:
        self._open: OrderedDict[RolloutId, int] = OrderedDict()
        self._contexts: OrderedDict[CallId, tuple[RolloutId, int, int, bytes]] = OrderedDict()

    def add(self, connection: Connection, additions: Sequence[Addition]) -> list[ManegeError | None]:
        """Per call: None, NotFoundError for an unknown rollout, ConflictError once its attempt is over."""
        results: list[ManegeError | None] = []
        rows: list[tuple[Any, ...]] = []
        self.forget(changed_rollouts(connection))
        for addition in additions:
            call = addition.call
            try:
                self._check_open(connection, call)
                rows.append(self._row(connection, addition))
                results.append(None)
            except (ConflictError, NotFoundError) as refusal:
                results.append(refusal)
        if rows:
            statement = _INSERT + ", ".join([_ROW] * len(rows))
            connection.exec_driver_sql(statement, tuple(value for row in rows for value in row))
        return results

    def forget(self, changed: Collection[RolloutId] | None) -> None:
        """These rollouts may have changed their state; None: what was written last was undone."""
        if changed is None:
            self._open.clear()
            self._contexts.clear()
        for rollout_id in changed or ():
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
        _remember(self._open, call.rollout_id, call.attempt)

    def _row(self, connection: Connection, addition: Addition) -> tuple[Any, ...]:
        call, prompt_ids_P = addition.call, addition.call.prompt_ids_P
        if addition.num_shared is None:
            num_shared, context_hash = self._shared(connection, call)
            context_len = len(prompt_ids_P) + len(call.response_ids_R)
            prompt_ids_P = prompt_ids_P[num_shared:]
        else:
            num_shared, context_hash = addition.num_shared, b""
            context_len = num_shared + len(prompt_ids_P) + len(call.response_ids_R)
        _remember(self._contexts, call.id, (call.rollout_id, call.attempt, context_len, context_hash))
        return (
            call.id,
            call.rollout_id,
            call.attempt,
            call.parent,
            num_shared,
            _bytes(prompt_ids_P),
            _bytes(call.response_ids_R),
            call.logprobs_R.astype("<f4", copy=False).tobytes(),
            context_len,
            context_hash,
            dumps(call_record(call)),
            call.delivered,
        )

    def _shared(self, connection: Connection, call: Call) -> tuple[int, bytes]:
        """Leading tokens of the prompt that the parent holds already, 0 when it is not its prefix; and the hash of the
        call's context. Everything is hashed once."""
        hasher = hashlib.blake2b(digest_size=16)
        prompt, num_shared = _bytes(call.prompt_ids_P), 0
        length, parent_hash = self._context(connection, call)
        if 0 < length <= len(call.prompt_ids_P):
            hasher.update(prompt[: 4 * length])
            num_shared = length if hasher.digest() == parent_hash else 0
        else:
            length = 0
        hasher.update(prompt[4 * length :])
        hasher.update(_bytes(call.response_ids_R))
        return num_shared, hasher.digest()

    def _context(self, connection: Connection, call: Call) -> tuple[int, bytes]:
        """Length and hash of the parent's context; 0 when there is none of this attempt."""
        if call.parent is None:
            return 0, b""
        if known := self._contexts.get(call.parent):
            return known[2:] if known[:2] == (call.rollout_id, call.attempt) else (0, b"")
        key = {"parent": call.parent, "rollout_id": call.rollout_id, "attempt": call.attempt}
        parent = connection.execute(_PARENT, key).one_or_none()
        return (0, b"") if parent is None else (parent.context_len, parent.context_hash)


def set_delivered(connection: Connection, notes: Sequence[tuple[CallId, Delivered]]) -> list[ManegeError | None]:
    """Per note: None, or NotFoundError."""
    missing: set[CallId] = set()
    for value in dict.fromkeys(delivered for _, delivered in notes):
        ids_ = [call_id for call_id, delivered in notes if delivered is value]
        if _deliver(connection, value, ids_) < len(ids_):
            missing.update(call_id for call_id in ids_ if not _deliver(connection, value, [call_id]))
    return [NotFoundError(f"call {call_id!r} does not exist") if call_id in missing else None for call_id, _ in notes]


def _deliver(connection: Connection, value: Delivered, call_ids: Sequence[CallId]) -> int:
    marks = f"({', '.join('?' * len(call_ids))})"
    return connection.exec_driver_sql(_SET_DELIVERED + marks, (value, *call_ids)).rowcount


def of_rollouts(connection: Connection, rollout_ids: Sequence[RolloutId]) -> Mapping[RolloutId, Sequence[Call]]:
    """The calls of the last attempt of each rollout, in the order in which they were stored."""
    found: dict[RolloutId, Sequence[Call]] = {}
    for rollout_id in rollout_ids:
        known: dict[str, Call] = {}
        for row in connection.execute(_OF_ROLLOUT, {"rollout_id": rollout_id}):
            known[row.id] = _to_call(row, known)
        found[rollout_id] = list(known.values())
    return found


def _to_call(row: Row[Any], known: Mapping[str, Call]) -> Call:
    prompt_ids_P = ids(row.prompt)
    if row.num_shared:
        parent = known[row.parent]
        prompt_ids_P = np.concatenate([parent.prompt_ids_P, parent.response_ids_R, prompt_ids_P])
    record = {**orjson.loads(row.record), "delivered": row.delivered}
    return make_call(
        record, prompt_ids_P=prompt_ids_P, response_ids_R=ids(row.response), logprobs_R=floats(row.logprobs)
    )


def _bytes(ids_T: IntArray) -> bytes:
    return ids_T.astype("<i4", copy=False).tobytes()


def _remember(known: "OrderedDict[Any, Any]", key: Any, value: Any) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > MAX_KNOWN:
        known.popitem(last=False)
