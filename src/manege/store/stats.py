"""A run in numbers, and what waits the longest."""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from sqlalchemy import Column, ColumnElement, Connection, func, select

from manege.store.base import RunStats
from manege.store.tables import calls, raw_calls, rollouts
from manege.types import Outcome, RolloutState, RunId

__all__ = ["oldest", "run_stats"]


def run_stats(connection: Connection, run: RunId) -> RunStats:
    """Of all that is stored of a run."""
    of_run = rollouts.c.run == run
    times = [func.max(rollouts.c[name]) for name in ("created_s", "started_s", "ended_s")]
    reward_mean, first_s, *last_s = tuple[Any, ...](
        connection.execute(
            select(func.avg(rollouts.c.reward), func.min(rollouts.c.created_s), *times).where(of_run)
        ).one()
    )
    # Token ids have 4 bytes.
    sampled = ((calls, func.sum(calls.c.response_len)), (raw_calls, func.sum(func.length(raw_calls.c.response)) / 4))
    totals = [
        tuple[Any, ...](
            connection.execute(
                select(func.count(), tokens)
                .select_from(table.join(rollouts, table.c.rollout_id == rollouts.c.id))
                .where(of_run)
            ).one()
        )
        for table, tokens in sampled
    ]
    return RunStats(
        states={RolloutState(state): number for state, number in _counts(connection, rollouts.c.state, of_run)},
        outcomes={Outcome(each): number for each, number in _counts(connection, rollouts.c.outcome, of_run) if each},
        reward_mean=reward_mean,
        num_calls=sum(number for number, _ in totals),
        sampled_tokens=sum(int(tokens or 0) for _, tokens in totals),
        first_s=first_s,
        last_s=max((each for each in last_s if each is not None), default=None),
    )


def oldest(connection: Connection, run: RunId | None) -> Mapping[str, float]:
    """Since when the oldest of each kind waits; see `StoreReader.pending`."""
    of_run = [] if run is None else [rollouts.c.run == run]
    waiting = {
        "queued": select(func.min(rollouts.c.created_s)).where(rollouts.c.state == RolloutState.QUEUING, *of_run),
        "running": select(func.min(rollouts.c.started_s)).where(rollouts.c.state == RolloutState.RUNNING, *of_run),
    }
    found = {kind: connection.execute(statement).scalar() for kind, statement in waiting.items()}
    found["raw_call"] = _oldest_raw_call(connection, of_run)
    return {kind: since_s for kind, since_s in found.items() if since_s is not None}


def _oldest_raw_call(connection: Connection, of_run: list[Any]) -> float | None:
    joined = raw_calls.join(rollouts, raw_calls.c.rollout_id == rollouts.c.id)
    statement = select(raw_calls.c.record).select_from(joined).where(*of_run).order_by(raw_calls.c.seq).limit(1)
    record = connection.execute(statement).scalar()
    return None if record is None else orjson.loads(record)["ended_s"]


def _counts(connection: Connection, column: Column[Any], of_run: ColumnElement[bool]) -> Iterable[tuple[Any, ...]]:
    statement = select(column, func.count()).where(of_run).group_by(column)
    return [tuple[Any, ...](row) for row in connection.execute(statement)]
