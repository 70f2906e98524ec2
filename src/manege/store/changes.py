"""What the pending commit changes: noted where it is written, for those who remember what they read."""

from sqlalchemy import Connection

from manege.store.base import Changes
from manege.types import RolloutId, RunId

__all__ = ["note_key", "note_rollout", "note_run", "noted", "take_changes"]

_KEY = "manege_changes"


def note_rollout(connection: Connection, rollout_id: RolloutId) -> None:
    """A statement creates, changes or deletes this rollout."""
    _sets(connection)[0].add(rollout_id)


def note_run(connection: Connection, run_id: RunId) -> None:
    """A statement changes or deletes the config of this run."""
    _sets(connection)[1].add(run_id)


def note_key(connection: Connection, key: str) -> None:
    """A statement sets this value."""
    _sets(connection)[2].add(key)


def noted(connection: Connection) -> Changes:
    """Noted so far, since the last `take_changes`; some may have been undone."""
    rollouts, runs, keys = _sets(connection)
    return Changes(rollouts=frozenset(rollouts), runs=frozenset(runs), keys=frozenset(keys))


def take_changes(connection: Connection) -> Changes:
    """The same, and begin anew."""
    changes = noted(connection)
    connection.info.pop(_KEY)
    return changes


def _sets(connection: Connection) -> tuple[set[RolloutId], set[RunId], set[str]]:
    return connection.info.setdefault(_KEY, (set(), set(), set()))
