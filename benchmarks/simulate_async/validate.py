"""Predicted against measured: each run of benchmarks.async_speedup, simulated.

Agents, engine and updates are those of the benchmark's first run, which was `sync` and whose tools took no time; tool
times are drawn as in the run that is predicted. Nothing is taken from that run itself, unless `own_updates` says so:
seconds of an update depend on what has been learned and, where agents share the processor, on what they do meanwhile.
"""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.async_speedup.waits import ToolTime
from benchmarks.simulate_async.model import Result, simulate
from benchmarks.simulate_async.trace import Trace
from benchmarks.simulate_async.workload import Plan, Workload
from manege.train_config import TrainConfig

__all__ = ["validation", "with_tools"]

_COLUMNS = (
    "run",
    "seconds",
    "predicted",
    "error",
    "rollouts/s",
    "predicted",
    "staleness",
    "predicted",
    "engine idle",
    "predicted",
    "trainer idle",
    "predicted",
)


def validation(raw: Mapping[str, Any], *, own_updates: bool = False) -> str:
    """A table, a run per row."""
    trace = Trace.from_json(raw["trace"])
    lines, errors = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"], list[float]()
    for run in raw["runs"]:
        result = predicted(run, trace, own_updates=own_updates)
        errors.append(result.seconds / run["train_s"] - 1)
        lines.append(_row(run, result))
    return "\n".join([*lines, "", f"mean absolute error of the seconds: {statistics.fmean(map(abs, errors)):.1%}"])


def predicted(run: Mapping[str, Any], trace: Trace, *, own_updates: bool) -> Result:
    """The simulation of a run."""
    hardware = replace(
        trace.hardware,
        slots=run["slots"],
        num_interim=run["num_interim"],
        evaluate_every=run["evaluate_every"],
        update_s=run["update_s"] if own_updates else trace.hardware.update_s,
    )
    workload = with_tools(trace.workload, ToolTime.parse(run["tool_time"]))
    return simulate(TrainConfig(**run["train"]), hardware, workload, seed=run["seed"])


def with_tools(workload: Workload, tool_time: ToolTime) -> Workload:
    """The same rollouts, whose tools take long; an evaluation's take none."""

    def plan(index: int, member: int) -> Plan:
        quick = workload(index, member)
        if index < 0:
            return quick
        turns, left_s = [], tool_time.seconds(index, member)
        for turn, wait_s in zip(quick.turns, tool_time.waits(index, member), strict=False):
            turns.append(replace(turn, tool_s=turn.tool_s + wait_s))
            left_s -= wait_s
        return replace(quick, turns=turns, score_s=quick.score_s + left_s)

    return plan


def _row(run: Mapping[str, Any], result: Result) -> str:
    num_rollouts = len(result.rows) * result.num_rollouts
    cells = (
        f"{run['tools']} {run['schedule']} {run['seed']}",
        f"{run['train_s']:.0f}",
        f"{result.seconds:.0f}",
        f"{result.seconds / run['train_s'] - 1:+.0%}",
        f"{run['num_rollouts'] / run['train_s']:.2f}",
        f"{num_rollouts / result.seconds:.2f}",
        f"{run['staleness_mean']:.2f}",
        f"{statistics.fmean(result.staleness):.2f}",
        f"{run['engine_idle_s'] / run['train_s']:.0%}",
        f"{result.engine_idle_s / result.seconds:.0%}",
        f"{run['trainer_idle_s'] / run['train_s']:.0%}",
        f"{result.trainer_idle_s / result.seconds:.0%}",
    )
    return f"| {' | '.join(cells)} |"
