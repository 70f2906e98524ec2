"""What a run with `schedule = "sync"` tells about its agents, its engine and its updates; also as JSON.

Groups do again what they did in that run, by their index, from the beginning when they are used up: a policy that
learns changes how its agents go on, and members of a group are alike. A gap between two calls is tool time. Calls that
had to wait for an update, as with `async`, would make the engine look slow.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.simulate_async.engine import Speed
from benchmarks.simulate_async.fit import Served, fit_speed
from benchmarks.simulate_async.model import Hardware
from benchmarks.simulate_async.workload import Plan, Turn
from manege.cli.stored import config_of, find_run, reading
from manege.errors import ConfigError
from manege.trainer.metrics import read_metrics
from manege.types import Call, Rollout

__all__ = ["Trace", "read_trace", "update_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A run."""

    hardware: Hardware
    groups: Sequence[Sequence[Plan]]
    """By the groups' index."""
    evaluated: Sequence[Plan]
    engine_s: float
    """Mean over the training rollouts of the seconds of all calls."""

    def workload(self, index: int, member: int) -> Plan:
        """What a rollout does: a Workload."""
        if index < 0:
            return self.evaluated[-index % len(self.evaluated)]
        members = self.groups[index % len(self.groups)]
        return members[member % len(members)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Trace":
        """The same again."""
        hardware = data["hardware"]
        return cls(
            hardware=Hardware(**{**hardware, "speed": Speed(**hardware["speed"])}),
            groups=[[_plan_from(plan) for plan in members] for members in data["groups"]],
            evaluated=[_plan_from(plan) for plan in data["evaluated"]],
            engine_s=data["engine_s"],
        )


async def read_trace(run: str) -> Trace:
    """`run`: its folder. Raises ConfigError."""
    async with reading(run) as (reader, run_id):
        config = config_of(run_id, await find_run(reader, run_id))
        rollouts = (await reader.list_rollouts(run=run_id, limit=None)).rollouts
        calls = await reader.calls([rollout.spec.id for rollout in rollouts])
    ended = [
        rollout for rollout in rollouts if rollout.ended_s and rollout.started_s and rollout.completion is not None
    ]
    calls = {each.spec.id: sorted(calls.get(each.spec.id, []), key=lambda call: call.created_s) for each in ended}
    if not any(calls.values()):
        raise ConfigError(f"run {run_id} has no model call to learn from")
    shared_tokens = _shared([made[0] for made in calls.values() if made])
    trained = [rollout for rollout in ended if rollout.spec.is_train]
    hardware = Hardware(
        speed=fit_speed(
            [each for made in calls.values() for each in _served(made, shared_tokens)],
            max_batch=config.engine.max_batch,
        ),
        slots=config.controller.slots,
        update_s=update_seconds(read_metrics(config.run_folder / "metrics.jsonl")),
        shared_tokens=shared_tokens,
    )
    return Trace(
        hardware=hardware,
        groups=[[_plan(each, calls[each.spec.id]) for each in members] for members in _grouped(trained)],
        evaluated=[_plan(each, calls[each.spec.id]) for each in ended if not each.spec.is_train],
        engine_s=float(np.mean([sum(c.ended_s - c.created_s for c in calls[each.spec.id]) for each in trained])),
    )


def update_seconds(rows: Sequence[Mapping[str, Any]]) -> Sequence[float]:
    """Seconds of each step's update without what it waited for calls; 0: it was passed over."""
    steps = [row for row in rows if row["kind"] == "step"]
    return [row["update_s"] - row.get("drain_s", 0.0) if row["optimiser_steps"] else 0.0 for row in steps]


def _grouped(rollouts: Sequence[Rollout]) -> Sequence[Sequence[Rollout]]:
    groups: dict[int, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda rollout: rollout.spec.id):
        found = re.fullmatch(r".+-(\d+)-\d+", rollout.spec.id)
        if found:
            groups.setdefault(int(found[1]), []).append(rollout)
    return [members for _, members in sorted(groups.items())]


def _plan(rollout: Rollout, calls: Sequence[Call]) -> Plan:
    assert rollout.started_s is not None
    assert rollout.ended_s is not None
    starts = [*(call.created_s for call in calls), rollout.ended_s]
    turns = [
        Turn(
            prompt_tokens=len(call.prompt_ids_P),
            answer_tokens=max(1, len(call.response_ids_R)),
            tool_s=max(0.0, next_s - call.ended_s),
        )
        for call, next_s in zip(calls, starts[1:], strict=True)
    ]
    if not turns:
        return Plan(start_s=rollout.ended_s - rollout.started_s, turns=[], score_s=0.0)
    # What follows the last call is the end of the agent and its score.
    return Plan(
        start_s=max(0.0, starts[0] - rollout.started_s),
        turns=[*turns[:-1], replace(turns[-1], tool_s=0.0)],
        score_s=turns[-1].tool_s,
    )


def _served(calls: Sequence[Call], shared_tokens: int) -> Sequence[Served]:
    num_cached, served = shared_tokens, list[Served]()
    for call in calls:
        served.append(
            Served(
                start_s=call.created_s,
                end_s=call.ended_s,
                new_tokens=max(1, len(call.prompt_ids_P) - num_cached),
                num_tokens=len(call.response_ids_R),
            )
        )
        num_cached = len(call.prompt_ids_P) + len(call.response_ids_R)
    return served


def _shared(calls: Sequence[Call]) -> int:
    """Tokens that all these prompts begin with."""
    first = calls[0].prompt_ids_P
    length = len(first)
    for call in calls[1:]:
        length = min(length, len(call.prompt_ids_P))
        differs = np.flatnonzero(call.prompt_ids_P[:length] != first[:length])
        length = int(differs[0]) if len(differs) else length
    return length


def _plan_from(data: Mapping[str, Any]) -> Plan:
    return Plan(start_s=data["start_s"], turns=[Turn(**turn) for turn in data["turns"]], score_s=data["score_s"])
