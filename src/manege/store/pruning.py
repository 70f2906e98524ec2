"""Deleting a run, and the parts of requests that no call refers to any more."""

from sqlalchemy import Connection, delete, func, select

from manege.errors import ConflictError
from manege.store.changes import note_rollout, note_run
from manege.store.contents import part_ids
from manege.store.tables import calls, contents, events, raw_calls, rollouts, runs
from manege.types import TERMINAL, RolloutId, RunId

__all__ = ["prune_run"]

_PER_QUERY = 500


def prune_run(connection: Connection, run_id: RunId) -> int:
    """Returns the number of rollouts. Raises ConflictError while some have not ended."""
    of_run = rollouts.c.run == run_id
    num_open = connection.execute(select(func.count()).where(of_run, rollouts.c.state.not_in(TERMINAL))).scalar_one()
    if num_open:
        raise ConflictError(f"run {run_id!r} has {num_open} rollouts that have not ended; cancel them, or wait")
    rollout_ids = connection.execute(select(rollouts.c.id).where(of_run)).scalars().all()
    for table in (calls, raw_calls, events):
        connection.execute(delete(table).where(table.c.rollout_id.in_(select(rollouts.c.id).where(of_run))))
    connection.execute(delete(rollouts).where(of_run))
    connection.execute(delete(runs).where(runs.c.id == run_id))
    for rollout_id in rollout_ids:
        note_rollout(connection, RolloutId(rollout_id))
    note_run(connection, run_id)
    _sweep(connection)
    return len(rollout_ids)


def _sweep(connection: Connection) -> None:
    used = {part for ids in connection.execute(select(calls.c.parts)).scalars() for part in part_ids(ids)}
    unused = sorted(set(connection.execute(select(contents.c.id)).scalars()) - used)
    for first in range(0, len(unused), _PER_QUERY):
        connection.execute(delete(contents).where(contents.c.id.in_(unused[first : first + _PER_QUERY])))
