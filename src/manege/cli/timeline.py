"""When each rollout of a run ran, and under which weights its calls were sampled.

In: rollouts, the pieces of their calls, rows of metrics. Out: bars in lanes, so that the number of lanes is the largest
number of rollouts at once; and the updates. Times are seconds since the epoch. Only the last attempt of a rollout is
known; one that never started has no bar, and one that has not ended lasts until the last thing that is known.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from manege.cli.places import metrics_of
from manege.cli.stored import StoredRun
from manege.errors import ConfigError
from manege.types import Call, Outcome, PolicyVersion, Rollout, RolloutId, RolloutState

__all__ = ["Bar", "Piece", "Timeline", "Update", "call_pieces", "make_timeline", "pack", "read_timeline"]

_PAGE = 64
"""Rollouts whose calls are in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a call."""

    start_s: float
    end_s: float
    version: PolicyVersion | None
    """That sampled its tokens; None: the engine did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rollout."""

    rollout: RolloutId
    task: str
    is_train: bool
    state: RolloutState
    outcome: Outcome | None
    lane: int
    start_s: float
    end_s: float
    pieces: Sequence[Piece]
    """In the order of its calls, which may overlap; what lies between them are tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A step of the trainer, from the pause of the gateway on."""

    version: PolicyVersion
    """That it published."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run."""

    start_s: float
    end_s: float
    num_lanes: int
    bars: Sequence[Bar]
    """In the order in which they start."""
    updates: Sequence[Update]


async def read_timeline(stored: StoredRun) -> Timeline:
    """Of what is stored now; without updates where the run's folder is not here. Raises ConfigError."""
    pieces: dict[RolloutId, Sequence[Piece]] = {}
    for first in range(0, len(stored.rollouts), _PAGE):
        page = stored.rollouts[first : first + _PAGE]
        for rollout_id, calls in (await stored.source.calls([each.spec.id for each in page])).items():
            pieces[rollout_id] = [piece for call in calls for piece in call_pieces(call)]
    rows = metrics_of(stored.place, stored.id) if stored.place else []
    timeline = make_timeline(stored.rollouts, pieces, rows)
    if timeline is None:
        raise ConfigError(f"run {stored.id}: no rollout has started yet")
    return timeline


def make_timeline(
    rollouts: Sequence[Rollout], pieces: Mapping[RolloutId, Sequence[Piece]], rows: Sequence[Mapping[str, Any]]
) -> Timeline | None:
    """Pure. `rows`: of metrics. None: nothing has started."""
    starts = [(each.started_s, each) for each in rollouts if each.state is not RolloutState.QUEUING]
    started = sorted(((start, each) for start, each in starts if start is not None), key=lambda pair: pair[0])
    if not started:
        return None
    first_s = started[0][0]
    updates = [_update(row) for row in rows if row["kind"] == "step" and row["time_s"] >= first_s]
    last_s = max(
        first_s,
        *(each.ended_s or start for start, each in started),
        *(update.end_s for update in updates),
        *(piece.end_s for _, each in started for piece in pieces.get(each.spec.id, ())),
    )
    spans = [(start, max(start, each.ended_s or last_s)) for start, each in started]
    lanes = pack(spans)
    return Timeline(
        start_s=min([first_s, *(update.start_s for update in updates)]),
        end_s=last_s,
        num_lanes=1 + max(lanes),
        bars=[
            _bar(each, lane, span, pieces.get(each.spec.id, ()))
            for (_, each), lane, span in zip(started, lanes, spans, strict=True)
        ],
        updates=updates,
    )


def _update(row: Mapping[str, Any]) -> Update:
    return Update(version=row["policy_version"], start_s=row["time_s"] - row["update_s"], end_s=row["time_s"])


def _bar(rollout: Rollout, lane: int, span: tuple[float, float], pieces: Sequence[Piece]) -> Bar:
    """What an agent asked for and did not live to see is cut off."""
    start_s, end_s = span
    return Bar(
        rollout=rollout.spec.id,
        task=rollout.spec.task.id,
        is_train=rollout.spec.is_train,
        state=rollout.state,
        outcome=rollout.outcome,
        lane=lane,
        start_s=start_s,
        end_s=end_s,
        pieces=[
            replace(piece, start_s=max(piece.start_s, start_s), end_s=min(piece.end_s, end_s))
            for piece in pieces
            if piece.start_s < end_s and piece.end_s > start_s
        ],
    )


def pack(spans: Sequence[tuple[float, float]]) -> Sequence[int]:
    """The lane of each (start, end), which come by start: the lowest that is free. So there are as few as can be."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    lanes: list[int] = []
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def call_pieces(call: Call) -> Sequence[Piece]:
    """One per policy version that sampled it, as long as its share of the tokens."""
    num_tokens = len(call.response_ids_R)
    if not num_tokens or not call.spans:
        return [Piece(start_s=call.created_s, end_s=call.ended_s, version=None)]
    spans = [call.spans[0]]
    spans += [span for before, span in pairwise(call.spans) if span.version != before.version]
    shares = [0.0, *(span.first_token / num_tokens for span in spans[1:]), 1.0]
    edges = [call.created_s + share * (call.ended_s - call.created_s) for share in shares]
    return [
        Piece(start_s=start, end_s=end, version=span.version)
        for span, (start, end) in zip(spans, pairwise(edges), strict=True)
    ]
