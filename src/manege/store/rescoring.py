"""A verdict changed after the end: what a rollout did stays, what it is worth is judged anew.

The rollout has the new verdict from then on, for whoever reads it: shows, exports, trainings that ask for it again. The
one before stays in its log, as an event `rescored`. Its place in the order of completion stays too, so no feed brings
it again. Rewards of single calls are events of which the last counts: those that the new verdict lacks become 0.
"""

from collections.abc import Iterator, Mapping

import orjson
from sqlalchemy import Connection, insert, select, update

from manege.errors import ConflictError
from manege.store import rollouts
from manege.store.base import Ending
from manege.store.changes import note_rollout
from manege.store.codec import dumps
from manege.store.tables import events
from manege.store.tables import rollouts as table
from manege.types import TERMINAL, CallId, JsonObject, Outcome, Rollout, RolloutId

__all__ = ["rescore"]


def rescore(
    connection: Connection, rollout_id: RolloutId, attempt: int, ending: Ending, scorer: str, now_s: float
) -> Rollout:
    """`ending`: as the attempt would end now; its evidence stays as it was. Raises ConflictError for a rollout that has
    not ended or was cancelled, and for another attempt than its last; UnprocessableError for rewards of calls that it
    did not make."""
    rollout = rollouts.get(connection, rollout_id)
    if rollout.state not in TERMINAL or rollout.outcome is Outcome.CANCELLED or rollout.attempt != attempt:
        raise ConflictError(
            f"attempt {attempt} of rollout {rollout_id} cannot be scored again: the rollout is {rollout.state}, "
            f"its last attempt {rollout.attempt}"
        )
    rollouts.check_calls(connection, rollout_id, attempt, ending.call_rewards)
    reward = ending.outcome.default_reward if ending.reward is None else ending.reward
    after = {"outcome": ending.outcome, "reward": reward, "message": ending.message}
    note = {"before": {name: getattr(rollout, name) for name in after}, "after": after, "scorer": scorer}
    for event_type, data in (("rescored", note), *_call_rewards(connection, rollout, ending.call_rewards)):
        key = {"rollout_id": rollout_id, "attempt": attempt, "event_type": event_type}
        connection.execute(insert(events).values(**key, data=dumps(data), timestamp_s=now_s))
    statement = update(table).where(table.c.id == rollout_id)
    connection.execute(statement.values(**after, state=ending.outcome.state))
    note_rollout(connection, rollout_id)
    return rollouts.get(connection, rollout_id)


def _call_rewards(
    connection: Connection, rollout: Rollout, earned: Mapping[CallId, float]
) -> Iterator[tuple[str, JsonObject]]:
    """New ones, and zeros for those that are none any more."""
    statement = select(events.c.data).where(events.c.rollout_id == rollout.spec.id)
    statement = statement.where(events.c.attempt == rollout.attempt, events.c.event_type == "call_reward")
    before = [orjson.loads(text)["call"] for text in connection.execute(statement.order_by(events.c.seq)).scalars()]
    for call_id, value in {**dict.fromkeys(before, 0.0), **earned}.items():
        yield "call_reward", {"call": call_id, "value": value, "source": "scorer"}
