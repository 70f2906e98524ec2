"""Calls out of the database, as they are kept: indexed ones first, then those that have just come."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import zstandard
from sqlalchemy import ColumnElement, Connection, Row, Table, and_, select, text

from manege.store.base import StoredCall
from manege.store.codec import floats, ids
from manege.store.contents import join_parts, read_contents, with_members
from manege.store.tables import calls, raw_calls, rollouts
from manege.types import CallId, RolloutId

__all__ = ["attempt_ids", "of_attempt", "of_rollouts"]

_PER_QUERY = 500
_ATTEMPT_IDS = text(
    "SELECT id FROM (SELECT 0 AS part, seq, id FROM calls WHERE rollout_id = :rollout_id AND attempt = :attempt "
    "UNION ALL SELECT 1, seq, id FROM raw_calls WHERE rollout_id = :rollout_id AND attempt = :attempt) AS found "
    "ORDER BY part, seq"
)
"""Asked for with many a call: built once, and one statement."""


def of_rollouts(connection: Connection, rollout_ids: Sequence[RolloutId]) -> Mapping[RolloutId, Sequence[StoredCall]]:
    """The calls of the last attempt of each rollout, in the order in which they were stored."""
    indexed: list[Row[Any]] = []
    raw: list[Row[Any]] = []
    for first in range(0, len(rollout_ids), _PER_QUERY):
        some = rollout_ids[first : first + _PER_QUERY]
        for table, rows in ((calls, indexed), (raw_calls, raw)):
            last = and_(table.c.rollout_id == rollouts.c.id, table.c.attempt == rollouts.c.attempt)
            statement = select(table).join(rollouts, last).where(rollouts.c.id.in_(some)).order_by(table.c.seq)
            rows += connection.execute(statement).all()
    return _build(connection, indexed, raw, rollout_ids)


def of_attempt(connection: Connection, rollout_id: RolloutId, attempt: int) -> Sequence[StoredCall]:
    """Those of one attempt that are indexed."""
    rows = connection.execute(select(calls).where(*_of(calls, rollout_id, attempt)).order_by(calls.c.seq)).all()
    return _build(connection, rows, [], [rollout_id])[rollout_id]


def attempt_ids(connection: Connection, rollout_id: RolloutId, attempt: int) -> Sequence[CallId]:
    """The ids of the calls of one attempt, in the order in which they were stored."""
    given = {"rollout_id": rollout_id, "attempt": attempt}
    return [CallId(call_id) for call_id in connection.execute(_ATTEMPT_IDS, given).scalars()]


def _of(table: Table, rollout_id: RolloutId, attempt: int) -> Sequence[ColumnElement[bool]]:
    return table.c.rollout_id == rollout_id, table.c.attempt == attempt


def _build(
    connection: Connection, indexed: Sequence[Row[Any]], raw: Sequence[Row[Any]], rollout_ids: Sequence[RolloutId]
) -> Mapping[RolloutId, Sequence[StoredCall]]:
    found: dict[RolloutId, list[StoredCall]] = {rollout_id: [] for rollout_id in rollout_ids}
    position: dict[str, int] = {}
    parts, unpack = read_contents(connection, (row.parts for row in indexed)), zstandard.ZstdDecompressor().decompress

    def add(row: Row[Any], record: bytes, base: CallId | None, prompt: bytes, response: bytes, logprobs: bytes) -> None:
        position[row.id] = len(found[row.rollout_id])
        stored = StoredCall(
            record=record,
            new_ids_N=ids(prompt),
            response_ids_R=ids(response),
            logprobs_R=floats(logprobs),
            base=None if base is None else position[base],
            num_shared=row.num_shared or 0,
        )
        found[row.rollout_id].append(stored)

    for row in indexed:
        request, headers = join_parts(row.parts, parts)
        more = b'"request":%s,"headers":%s,"delivered":"%s"' % (request, headers, row.delivered.encode())
        record = with_members(unpack(row.record), more)
        add(row, record, row.base, *(unpack(blob) for blob in (row.prompt, row.response, row.logprobs)))
    for row in raw:
        base = orjson.loads(row.record)["parent"] if row.num_shared else None
        add(row, row.record, base, row.prompt, row.response, row.logprobs)
    return found
