"""From calls as they came to calls as they are kept: each as what it adds to an earlier one, its parts stored once.

A prompt mostly starts with the prompt + response of the call before it, so only what follows is stored, with the number
of shared tokens. Where the gateway continued a call it has said so; else the contexts of the attempt's last calls are
compared. A rollout of T turns thus costs O(T) tokens, also where its agent rewrites its history in part:

    call 1: shared 0, prompt [1 2 3], response [4]                -> prompt [1 2 3]
    call 2: base call 1, shared 4, prompt [5 6], response [7]     -> prompt [1 2 3 4 5 6]
    call 3: base call 2, shared 5, prompt [8]                     -> prompt [1 2 3 4 5 8]

Rows are moved from `raw_calls` to `calls` in one transaction, in the order in which they came, so what a crash leaves
in `raw_calls` is indexed by whoever comes next.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import zstandard
from sqlalchemy import Connection, Row, delete, func, select, update

from manege.errors import NotFoundError
from manege.store.base import Changes
from manege.store.codec import dump_bytes, id_bytes, ids
from manege.store.contents import Contents, split_parts
from manege.store.expand import expand
from manege.store.inserting import insert_new
from manege.store.stored_calls import of_attempt
from manege.store.tables import calls, raw_calls
from manege.types import CallId, Delivered, IntArray, RolloutId

__all__ = ["Indexer", "Note"]

ROWS_AT_ONCE = 256
MAX_CONTEXT_BYTES = 16 * 2**20
"""Of the contexts that are remembered, to find what a prompt shares; without them it is stored whole."""
_NUM_CONTEXTS = 4
"""Per attempt: conversations of its sub-agents take turns."""

Note = tuple[CallId, Delivered]
"""Whether the agent got the answer of a call."""


class Indexer:
    """Lives in the writer's thread."""

    def __init__(self) -> None:
        self._contents = Contents()
        self._contexts = _Contexts()
        self._changed: set[RolloutId] = set()
        """Rollouts that may have ended: their last calls are yet to be indexed."""
        self._pack = zstandard.ZstdCompressor()

    def index(self, connection: Connection, notes: Sequence[Note | None]) -> list[NotFoundError | None]:
        """Index all that has come, and keep notes on calls; per note None or NotFoundError."""
        delivered = dict(note for note in notes if note is not None)
        taken: set[str] = set()
        statement = select(raw_calls).order_by(raw_calls.c.seq).limit(ROWS_AT_ONCE)
        while rows := connection.execute(statement).all():
            self._move(connection, rows, delivered)
            taken.update(row.id for row in rows)
        while self._changed:
            self._contexts.forget(self._changed.pop())
        missing = {
            call_id
            for call_id, value in delivered.items()
            if call_id not in taken and not _deliver(connection, call_id, value)
        }
        return [
            NotFoundError(f"call {note[0]!r} does not exist") if note is not None and note[0] in missing else None
            for note in notes
        ]

    def forget(self, changes: Changes) -> None:
        """What is remembered may not be stored."""
        if changes.everything:
            self._contents.forget()
            self._contexts = _Contexts()
        self._changed |= changes.rollouts

    def _move(self, connection: Connection, rows: Sequence[Row[Any]], delivered: dict[CallId, Delivered]) -> None:
        records = [orjson.loads(row.record) for row in rows]
        split = [split_parts(record.pop("request"), record.pop("headers")) for record in records]
        ids_of_parts = iter(self._contents.put(connection, [part for parts, _ in split for part in parts]))
        first = (connection.execute(select(func.max(calls.c.seq))).scalar() or 0) + 1
        values = [
            {
                "seq": first + position,
                "id": row.id,
                "rollout_id": row.rollout_id,
                "attempt": row.attempt,
                **self._place(connection, row, record["parent"]),
                "response_len": len(row.response) // 4,
                "response": self._pack.compress(row.response),
                "logprobs": self._pack.compress(row.logprobs),
                "parts": _part_array([next(ids_of_parts) for _ in parts], numbers),
                "delivered": delivered.get(row.id, record.pop("delivered")),
                "record": self._pack.compress(dump_bytes(record)),
            }
            for position, (row, record, (parts, numbers)) in enumerate(zip(rows, records, split, strict=True))
        ]
        connection.execute(insert_new(connection, calls, "id"), values)
        connection.execute(delete(raw_calls).where(raw_calls.c.seq <= rows[-1].seq))

    def _place(self, connection: Connection, row: Row[Any], parent: CallId | None) -> dict[str, Any]:
        """Which earlier call the prompt begins with, and what it adds to it."""
        prompt_ids_P, response_ids_R = ids(row.prompt), ids(row.response)
        if row.num_shared is None:
            base, num_shared = self._contexts.longest_prefix(connection, row, prompt_ids_P)
            self._contexts.add(row, base, np.concatenate([prompt_ids_P, response_ids_R]))
            prompt_ids_P = prompt_ids_P[num_shared:]
        else:
            base, num_shared = parent, row.num_shared
            if (before := self._contexts.of(row, base)) is not None:
                self._contexts.add(row, base, np.concatenate([before[:num_shared], prompt_ids_P, response_ids_R]))
        return {"base": base, "num_shared": num_shared, "prompt": self._pack.compress(id_bytes(prompt_ids_P))}


class _Contexts:
    """Prompt + response of the last calls of each attempt, of the attempts that were active last."""

    def __init__(self) -> None:
        self._rollouts: OrderedDict[RolloutId, tuple[int, OrderedDict[CallId, IntArray]]] = OrderedDict()
        self._num_bytes = 0

    def forget(self, rollout_id: RolloutId) -> None:
        """It has ended, or begins another attempt."""
        if known := self._rollouts.pop(rollout_id, None):
            self._num_bytes -= sum(each.nbytes for each in known[1].values())

    def of(self, row: Row[Any], call_id: CallId | None) -> IntArray | None:
        """Of one call of the row's attempt, if it is remembered."""
        attempt, known = self._rollouts.get(row.rollout_id, (None, {}))
        return known.get(call_id) if attempt == row.attempt and call_id is not None else None

    def longest_prefix(
        self, connection: Connection, row: Row[Any], prompt_ids_P: IntArray
    ) -> tuple[CallId | None, int]:
        """The call whose context has the longest beginning in common with a prompt, and its length."""
        if self._rollouts.get(row.rollout_id, (None,))[0] != row.attempt:
            self.forget(row.rollout_id)
            for call in expand(of_attempt(connection, row.rollout_id, row.attempt))[-_NUM_CONTEXTS:]:
                self._put(row, call.id, np.concatenate([call.prompt_ids_P, call.response_ids_R]))
        best: tuple[CallId | None, int] = None, 0
        for call_id, context_ids_T in self._rollouts.get(row.rollout_id, (0, {}))[1].items():
            length = _common(prompt_ids_P, context_ids_T)
            # Of equal ones the latest.
            if length and length >= best[1]:
                best = call_id, length
        return best

    def add(self, row: Row[Any], base: CallId | None, context_ids_T: IntArray) -> None:
        """Remember a call; one that it extends whole is forgotten, since it shares all of that one's tokens."""
        extended = self.of(row, base)
        if base is not None and extended is not None and np.array_equal(extended, context_ids_T[: len(extended)]):
            del self._rollouts[row.rollout_id][1][base]
            self._num_bytes -= extended.nbytes
        self._put(row, row.id, context_ids_T)
        while self._num_bytes > MAX_CONTEXT_BYTES and len(self._rollouts) > 1:
            self.forget(next(iter(self._rollouts)))

    def _put(self, row: Row[Any], call_id: CallId, context_ids_T: IntArray) -> None:
        _, known = self._rollouts.setdefault(row.rollout_id, (row.attempt, OrderedDict()))
        self._rollouts.move_to_end(row.rollout_id)
        known[call_id] = context_ids_T
        self._num_bytes += context_ids_T.nbytes
        if len(known) > _NUM_CONTEXTS:
            self._num_bytes -= known.popitem(last=False)[1].nbytes


def _common(one_T: IntArray, other_T: IntArray) -> int:
    length = min(len(one_T), len(other_T))
    differs = one_T[:length] != other_T[:length]
    return int(differs.argmax()) if differs.any() else length


def _part_array(part_ids: Sequence[int], numbers: Sequence[int]) -> bytes:
    array, rest = list(part_ids[:2]), list(part_ids[2:])
    for number in numbers:
        array.append(number)
        array += rest[: max(number, 0)]
        rest = rest[max(number, 0) :]
    return np.array(array, "<i8").tobytes()


def _deliver(connection: Connection, call_id: CallId, value: Delivered) -> bool:
    return connection.execute(update(calls).where(calls.c.id == call_id).values(delivered=value)).rowcount > 0
