"""Rollouts that ended elsewhere, put into a store as they were: an export that is read back."""

from collections.abc import Sequence
from dataclasses import fields

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import IntegrityError

from manege.errors import ConflictError
from manege.store.base import Run
from manege.store.changes import note_rollout, note_run
from manege.store.codec import dumps
from manege.store.exports.base import ExportedRollout
from manege.store.raw_calls import Addition, RawCallWriter
from manege.store.tables import counters, events, rollouts, runs
from manege.types import Event, Rollout, RolloutState

__all__ = ["import_rollouts"]

_PER_STATEMENT = 256
"""As many calls as a group of the writer has."""
_JSON = ("spec", "evidence")
_ROLLOUT = [each.name for each in fields(Rollout) if each.name not in _JSON]


def import_rollouts(connection: Connection, run: Run | None, imported: Sequence[ExportedRollout]) -> None:
    """Keeps states, times, rewards and the order of completion; the config of a run that is known stays. Raises
    ConflictError for a rollout, or a place in that order, that the store has already."""
    if run is not None and connection.execute(select(runs.c.id).where(runs.c.id == run.id)).first() is None:
        connection.execute(insert(runs).values(id=run.id, config=dumps(run.config), created_s=run.created_s))
        note_run(connection, run.id)
    for each in imported:
        rollout = each.rollout
        values = {name: getattr(rollout, name) for name in _ROLLOUT} | {n: dumps(getattr(rollout, n)) for n in _JSON}
        key = {"id": rollout.spec.id, "run": rollout.spec.run, "group_id": rollout.spec.group}
        try:
            # Only open rollouts take calls.
            connection.execute(insert(rollouts).values(**key, **values | {"state": RolloutState.RUNNING}))
        except IntegrityError as error:
            raise ConflictError(
                f"rollout {rollout.spec.id!r}, or one that ended as number {rollout.completion}, is there already; "
                "import into a store of its own"
            ) from error
        _add_calls(connection, each)
        for event in each.events:
            row = {field.name: getattr(event, field.name) for field in fields(Event)}
            connection.execute(insert(events).values(**row | {"data": dumps(event.data)}))
        state = update(rollouts).where(rollouts.c.id == rollout.spec.id).values(state=rollout.state)
        connection.execute(state)
        note_rollout(connection, rollout.spec.id)
    last = max((each.rollout.completion or 0 for each in imported), default=0)
    higher = update(counters).where(counters.c.name == "completion", counters.c.value < last)
    connection.execute(higher.values(value=last))


def _add_calls(connection: Connection, each: ExportedRollout) -> None:
    writer = RawCallWriter()
    additions = [Addition(call=call, num_shared=None) for call in each.calls]
    for first in range(0, len(additions), _PER_STATEMENT):
        for refusal in writer.add(connection, additions[first : first + _PER_STATEMENT]):
            if refusal is not None:
                raise refusal
