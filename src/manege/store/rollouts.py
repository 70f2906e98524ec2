"""Rollouts in the database: rows to types, and the rules of their states.

Every function runs inside a transaction of the one writer (or of a reader, for reads), so a check and the write that
follows it cannot be separated. A rollout becomes terminal in `_end` only, which takes the next number of the order of
completion in the same transaction: numbers become visible in their order, so the terminal feed misses nothing.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import orjson
from sqlalchemy import Connection, Row, Select, and_, bindparam, delete, func, insert, select, update

from manege.errors import ConflictError, NotFoundError, UnprocessableError
from manege.store.base import Ending
from manege.store.changes import note_rollout
from manege.store.codec import SPEC, dumps
from manege.store.counters import count_up
from manege.store.stored_calls import attempt_ids
from manege.store.tables import calls, events, raw_calls, rollouts
from manege.types import (
    TERMINAL,
    TRANSITIONS,
    CallId,
    JsonObject,
    Outcome,
    Rollout,
    RolloutId,
    RolloutSpec,
    RolloutState,
)

__all__ = [
    "cancel",
    "check_calls",
    "claim",
    "create",
    "finish",
    "get",
    "grant_leases",
    "held",
    "of_rows",
    "query",
    "remove",
    "renew",
    "start",
]


# Built once, since every request of an agent reads its rollout.
_GET = select(rollouts).where(rollouts.c.id == bindparam("rollout_id"))


def _to_rollout(row: Row[Any]) -> Rollout:
    """A row of the table as the glossary's type."""
    return Rollout(
        spec=SPEC.validate_json(row.spec),
        state=RolloutState(row.state),
        attempt=row.attempt,
        outcome=Outcome(row.outcome) if row.outcome else None,
        reward=row.reward,
        message=row.message,
        evidence=orjson.loads(row.evidence),
        created_s=row.created_s,
        started_s=row.started_s,
        ended_s=row.ended_s,
        completion=row.completion,
    )


def of_rows(rows: Iterable[Row[Any]]) -> list[Rollout]:
    """Rows of the table as the glossary's type."""
    return [_to_rollout(row) for row in rows]


def query(connection: Connection, statement: Select[Any]) -> list[Rollout]:
    """The rollouts that a select of the table finds."""
    return of_rows(connection.execute(statement))


def get(connection: Connection, rollout_id: RolloutId) -> Rollout:
    """Raises NotFoundError."""
    row = connection.execute(_GET, {"rollout_id": rollout_id}).one_or_none()
    if row is None:
        raise NotFoundError(f"rollout {rollout_id!r} does not exist; it was never created or has been deleted")
    return _to_rollout(row)


def create(connection: Connection, specs: Sequence[RolloutSpec], now_s: float) -> list[Rollout]:
    """Queue rollouts; an id that exists already is returned as it is."""
    created: list[Rollout] = []
    for spec in specs:
        if known := connection.execute(_GET, {"rollout_id": spec.id}).one_or_none():
            created.append(_to_rollout(known))
            continue
        fresh = {"state": RolloutState.QUEUING, "attempt": 0, "created_s": now_s}
        key = {"id": spec.id, "run": spec.run, "group_id": spec.group}
        connection.execute(insert(rollouts).values(**key, spec=dumps(spec), evidence="{}", **fresh))
        note_rollout(connection, spec.id)
        created.append(Rollout(spec=spec, **fresh))
    return created


def claim(
    connection: Connection,
    controller: str,
    limit: int,
    lease_s: float,
    now_s: float,
    holding: Collection[RolloutId] | None,
) -> list[Rollout]:
    """Queued rollouts and those that were lost, oldest first, now running under this controller's lease."""
    lost_lease = rollouts.c.lease_until_s < now_s
    if holding is not None:
        lost_lease |= and_(rollouts.c.controller == controller, rollouts.c.id.not_in(holding))
    is_lost = and_(rollouts.c.state == RolloutState.RUNNING, lost_lease)
    for lost in query(connection, select(rollouts).where(is_lost).order_by(rollouts.c.seq)):
        message = f"attempt {lost.attempt} was lost: its controller died, or stopped renewing the lease"
        _end_attempt(connection, lost, Ending(outcome=Outcome.INFRA_ERROR, message=message), now_s)
    is_due = func.coalesce(rollouts.c.not_before_s, 0) <= now_s
    queued = select(rollouts).where(rollouts.c.state == RolloutState.QUEUING, is_due)
    taken = query(connection, queued.order_by(rollouts.c.seq).limit(limit))
    for rollout in taken:
        _start(connection, rollout.spec.id, now_s, controller=controller, lease_s=lease_s)
    return [get(connection, rollout.spec.id) for rollout in taken]


def held(connection: Connection, controller: str, lease_s: float, now_s: float) -> list[Rollout]:
    """All that a controller had when it was last heard of, its leases prolonged: nobody has taken them over yet."""
    is_held = and_(rollouts.c.state == RolloutState.RUNNING, rollouts.c.controller == controller)
    connection.execute(update(rollouts).where(is_held).values(lease_until_s=now_s + lease_s, lease_s=lease_s))
    return query(connection, select(rollouts).where(is_held).order_by(rollouts.c.seq))


def start(connection: Connection, rollout_id: RolloutId, evidence: JsonObject, now_s: float) -> Rollout:
    """queuing -> running without a lease, for a controller that has none. Raises ConflictError."""
    rollout = get(connection, rollout_id)
    if rollout.state is not RolloutState.QUEUING:
        raise _refused(rollout, RolloutState.RUNNING)
    _start(connection, rollout_id, now_s, controller=None, lease_s=None)
    _set(connection, rollout_id, evidence=dumps({**rollout.evidence, **evidence}))
    return get(connection, rollout_id)


def renew(
    connection: Connection, controller: str, rollout_ids: Sequence[RolloutId], lease_s: float, now_s: float
) -> list[RolloutId]:
    """Prolong leases, or give them up (0 s); returns those that are not this controller's any more."""
    lost: list[RolloutId] = []
    for rollout_id in rollout_ids:
        prolonged = connection.execute(
            update(rollouts)
            .where(rollouts.c.id == rollout_id)
            .where(rollouts.c.state == RolloutState.RUNNING, rollouts.c.controller == controller)
            .values(lease_until_s=now_s + lease_s, lease_s=lease_s)
        )
        if prolonged.rowcount == 0:
            lost.append(rollout_id)
        elif lease_s == 0:
            _give_back(connection, get(connection, rollout_id), now_s)
    return lost


def grant_leases(connection: Connection, now_s: float) -> None:
    """After a restart of ours: controllers could not renew while we were away, so every lease starts anew."""
    connection.execute(
        update(rollouts)
        .where(rollouts.c.state == RolloutState.RUNNING, rollouts.c.lease_s.is_not(None))
        .values(lease_until_s=now_s + rollouts.c.lease_s)
    )


def finish(connection: Connection, rollout_id: RolloutId, attempt: int, ending: Ending, now_s: float) -> Rollout:
    """End the current attempt. Raises ConflictError for another attempt or a terminal rollout, UnprocessableError for
    rewards of calls that it did not make."""
    rollout = get(connection, rollout_id)
    if rollout.attempt != attempt:
        raise ConflictError(f"attempt {attempt} of rollout {rollout_id} is over; the current one is {rollout.attempt}")
    check_calls(connection, rollout_id, attempt, ending.call_rewards)
    _end_attempt(connection, rollout, ending, now_s)
    return get(connection, rollout_id)


def cancel(connection: Connection, rollout_id: RolloutId, now_s: float) -> Rollout:
    """Terminal at once; a terminal rollout stays as it is."""
    rollout = get(connection, rollout_id)
    if rollout.state not in TERMINAL:
        _end(connection, rollout, Ending(outcome=Outcome.CANCELLED, message="cancelled"), now_s)
    return get(connection, rollout_id)


def check_calls(connection: Connection, rollout_id: RolloutId, attempt: int, call_ids: Collection[CallId]) -> None:
    """Raises UnprocessableError that names the first of them that is no call of this attempt."""
    if not call_ids:
        return
    unknown = sorted(set(call_ids).difference(attempt_ids(connection, rollout_id, attempt)))
    if unknown:
        raise UnprocessableError(
            f"attempt {attempt} of rollout {rollout_id} has no call {unknown[0]!r}; a call's id is the one that its "
            "answer has, or that the scorer finds in its record"
        )


def remove(connection: Connection, rollout_id: RolloutId) -> None:
    """Delete a rollout with its calls and events. Raises NotFoundError."""
    get(connection, rollout_id)
    for table in (calls, raw_calls, events):
        connection.execute(delete(table).where(table.c.rollout_id == rollout_id))
    connection.execute(delete(rollouts).where(rollouts.c.id == rollout_id))
    note_rollout(connection, rollout_id)


def _start(
    connection: Connection, rollout_id: RolloutId, now_s: float, *, controller: str | None, lease_s: float | None
) -> None:
    lease = {"lease_s": lease_s, "lease_until_s": None if lease_s is None else now_s + lease_s}
    _set(connection, rollout_id, state=RolloutState.RUNNING, started_s=now_s, controller=controller, **lease)


def _end_attempt(connection: Connection, rollout: Rollout, ending: Ending, now_s: float) -> None:
    """Another attempt after an infrastructure failure, if one is left; else the end of the rollout."""
    is_last = ending.is_final or rollout.attempt + 1 >= rollout.spec.max_attempts
    if ending.outcome is Outcome.INFRA_ERROR and rollout.state is RolloutState.RUNNING and not is_last:
        again = {"attempt": rollout.attempt + 1, "not_before_s": now_s + ending.retry_after_s}
        _leave(connection, rollout, ending, state=RolloutState.QUEUING, **again)
    else:
        _end(connection, rollout, ending, now_s)


def _give_back(connection: Connection, rollout: Rollout, now_s: float) -> None:
    """An orderly stop is no failure: the rollout gets the attempt back that it costs."""
    spec = replace(rollout.spec, max_attempts=rollout.spec.max_attempts + 1)
    _set(connection, spec.id, spec=dumps(spec))
    message = f"attempt {rollout.attempt} was given back: its controller stopped"
    ending = Ending(outcome=Outcome.INFRA_ERROR, message=message)
    _end_attempt(connection, replace(rollout, spec=spec), ending, now_s)


def _end(connection: Connection, rollout: Rollout, ending: Ending, now_s: float) -> None:
    outcome, reward = ending.outcome, ending.reward
    if outcome.state not in TRANSITIONS[rollout.state]:
        raise _refused(rollout, outcome.state)
    if reward is None and outcome.counts and rollout.spec.reward_from == "agent":
        reward = _posted_reward(connection, rollout)
    if reward is None:
        reward = outcome.default_reward
    assert reward is None or math.isfinite(reward)
    for call_id, value in ending.call_rewards.items():
        data = dumps({"call": call_id, "value": value, "source": "scorer"})
        key = {"rollout_id": rollout.spec.id, "attempt": rollout.attempt, "event_type": "call_reward"}
        connection.execute(insert(events).values(**key, data=data, timestamp_s=now_s))
    completion = count_up(connection, "completion")
    values = {"outcome": outcome, "reward": reward, "ended_s": now_s, "completion": completion}
    _leave(connection, rollout, ending, state=outcome.state, **values)


def _leave(connection: Connection, rollout: Rollout, ending: Ending, **values: Any) -> None:
    """Nobody runs it any more."""
    # What a program printed may hold a NUL, which PostgreSQL's text may not.
    message = None if ending.message is None else ending.message.replace("\0", "\ufffd")
    values |= {"message": message, "evidence": dumps({**rollout.evidence, **ending.evidence})}
    _set(connection, rollout.spec.id, controller=None, lease_s=None, lease_until_s=None, **values)


def _posted_reward(connection: Connection, rollout: Rollout) -> float | None:
    """The last `reward` event of the current attempt."""
    last = connection.execute(
        select(events.c.data)
        .where(events.c.rollout_id == rollout.spec.id, events.c.attempt == rollout.attempt)
        .where(events.c.event_type == "reward")
        .order_by(events.c.seq.desc())
        .limit(1)
    ).scalar()
    return None if last is None else orjson.loads(last).get("value")


def _set(connection: Connection, rollout_id: RolloutId, **values: Any) -> None:
    connection.execute(update(rollouts).where(rollouts.c.id == rollout_id).values(**values))
    note_rollout(connection, rollout_id)


def _refused(rollout: Rollout, state: RolloutState) -> ConflictError:
    return ConflictError(f"rollout {rollout.spec.id} is {rollout.state} and cannot become {state}")
