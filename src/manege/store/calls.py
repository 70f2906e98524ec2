"""Calls in the database, each as what it adds to its parent.

A child's prompt starts with its parent's prompt + response, so only what follows is stored, with the number of shared
tokens. Whether it does start so is checked by length and hash, without reading the ancestors; if it does not, the
prompt is stored whole. A rollout of T turns thus costs O(T) tokens, and reading it rebuilds parents before children:

    call 1: shared 0, prompt [1 2 3], response [4]      -> prompt [1 2 3]
    call 2: parent 1, shared 4, prompt [5 6], ...       -> prompt [1 2 3 4 5 6]
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from sqlalchemy import Connection, Row, and_, bindparam, insert, select, update

from manege.errors import ConflictError, NotFoundError
from manege.store.codec import call_record, dumps, floats, ids, make_call
from manege.store.tables import calls, rollouts
from manege.types import TERMINAL, Call, CallId, Delivered, IntArray, RolloutId

__all__ = ["add", "of_rollouts", "set_delivered"]


# Built once: composing a statement costs more than running it, and two of these run per model call.
_ATTEMPT = select(rollouts.c.state, rollouts.c.attempt).where(rollouts.c.id == bindparam("rollout_id"))
_PARENT = select(calls.c.context_len, calls.c.context_hash).where(
    calls.c.id == bindparam("parent"),
    calls.c.rollout_id == bindparam("rollout_id"),
    calls.c.attempt == bindparam("attempt"),
)
_INSERT = insert(calls)
_SET_DELIVERED = update(calls).where(calls.c.id == bindparam("call_id")).values(delivered=bindparam("value"))
_OF_ROLLOUT = (
    select(calls)
    .join(rollouts, and_(calls.c.rollout_id == rollouts.c.id, calls.c.attempt == rollouts.c.attempt))
    .where(rollouts.c.id == bindparam("rollout_id"))
    .order_by(calls.c.seq)
)


def add(connection: Connection, call: Call) -> None:
    """Raises NotFoundError for an unknown rollout, ConflictError once its attempt is over."""
    row = connection.execute(_ATTEMPT, {"rollout_id": call.rollout_id}).one_or_none()
    if row is None:
        raise NotFoundError(f"rollout {call.rollout_id!r} of call {call.id} does not exist")
    if row.state in TERMINAL or row.attempt != call.attempt:
        raise ConflictError(
            f"call {call.id}: attempt {call.attempt} of rollout {call.rollout_id} is over ({row.state})"
        )
    num_shared = _num_shared(connection, call)
    context = np.concatenate([call.prompt_ids_P, call.response_ids_R])
    connection.execute(
        _INSERT,
        {
            "id": call.id,
            "rollout_id": call.rollout_id,
            "attempt": call.attempt,
            "parent": call.parent,
            "num_shared": num_shared,
            "prompt": _bytes(call.prompt_ids_P[num_shared:]),
            "response": _bytes(call.response_ids_R),
            "logprobs": call.logprobs_R.astype("<f4", copy=False).tobytes(),
            "context_len": len(context),
            "context_hash": _hash(context),
            "record": dumps(call_record(call)),
            "delivered": call.delivered,
        },
    )


def set_delivered(connection: Connection, call_id: CallId, delivered: Delivered) -> None:
    """Raises NotFoundError."""
    changed = connection.execute(_SET_DELIVERED, {"call_id": call_id, "value": delivered})
    if changed.rowcount == 0:
        raise NotFoundError(f"call {call_id!r} does not exist")


def of_rollouts(connection: Connection, rollout_ids: Sequence[RolloutId]) -> Mapping[RolloutId, Sequence[Call]]:
    """The calls of the last attempt of each rollout, in the order in which they were stored."""
    found: dict[RolloutId, Sequence[Call]] = {}
    for rollout_id in rollout_ids:
        known: dict[str, Call] = {}
        for row in connection.execute(_OF_ROLLOUT, {"rollout_id": rollout_id}):
            known[row.id] = _to_call(row, known)
        found[rollout_id] = list(known.values())
    return found


def _num_shared(connection: Connection, call: Call) -> int:
    """Leading tokens of the prompt that the parent holds already; 0 when it is not its prefix."""
    if call.parent is None:
        return 0
    key = {"parent": call.parent, "rollout_id": call.rollout_id, "attempt": call.attempt}
    parent = connection.execute(_PARENT, key).one_or_none()
    if parent is None or len(call.prompt_ids_P) < parent.context_len:
        return 0
    prefix = call.prompt_ids_P[: parent.context_len]
    return parent.context_len if _hash(prefix) == parent.context_hash else 0


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


def _hash(ids_T: IntArray) -> bytes:
    return hashlib.blake2b(_bytes(ids_T), digest_size=16).digest()
