"""Which rollouts the pending commit changes: noted where they are written, for those who remember their states."""

from sqlalchemy import Connection

from manege.types import RolloutId

__all__ = ["changed_rollouts", "note_change", "take_changes"]

_KEY = "manege_changed_rollouts"


def note_change(connection: Connection, rollout_id: RolloutId) -> None:
    """A statement changes or deletes this rollout."""
    connection.info.setdefault(_KEY, set()).add(rollout_id)


def changed_rollouts(connection: Connection) -> frozenset[RolloutId]:
    """Noted so far, since the last `take_changes`; some may have been undone."""
    return frozenset(connection.info.get(_KEY, ()))


def take_changes(connection: Connection) -> frozenset[RolloutId]:
    """The same, and begin anew."""
    return frozenset(connection.info.pop(_KEY, ()))
