"""The table of the benchmark: sync against async per kind of tools.

Seconds of training leave out evaluations that training waits for: those of sync, while those of async run beside it and
slow it down. Wall seconds hold them, from the evaluation before training to the last step.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["table", "time_to"]

_COLUMNS = (
    "tools",
    "schedule",
    "seeds",
    "seconds of training",
    "wall seconds",
    "seconds to {target:.0%}",
    "final success",
    "staleness, max",
    "engine idle",
    "trainer idle",
)
_HEAD = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|"


def table(runs: Sequence[Mapping[str, Any]], *, target: float) -> str:
    """Markdown; `runs` as `measured` makes them."""
    lines = [_HEAD.format(target=target)]
    kinds = list(dict.fromkeys(run["tools"] for run in runs if run["tools"] != "none"))
    for tools in kinds:
        for schedule in ("sync", "async"):
            if some := _of(runs, tools, schedule):
                lines.append(_row(some, target))
    return "\n".join([*lines, "", *(line for tools in kinds for line in _compared(runs, tools, target))])


def time_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Seconds of training until this held-out success, between two evaluations in proportion; None: never."""
    for (start_s, before), (end_s, after) in itertools.pairwise(curve):
        if before >= target:
            return start_s
        if after >= target:
            return start_s + (end_s - start_s) * (target - before) / (after - before)
    return None


def _of(runs: Sequence[Mapping[str, Any]], tools: str, schedule: str) -> Sequence[Mapping[str, Any]]:
    return [run for run in runs if (run["tools"], run["schedule"]) == (tools, schedule)]


def _row(runs: Sequence[Mapping[str, Any]], target: float) -> str:
    times = [seconds for run in runs if (seconds := time_to(run["curve"], target)) is not None]
    never = f" ({len(runs) - len(times)} never)" if len(times) < len(runs) else ""
    total_s = sum(run["train_s"] for run in runs)
    cells = (
        runs[0]["tools"],
        runs[0]["schedule"],
        str(len(runs)),
        _spread([run["train_s"] for run in runs], "{:.0f}"),
        _spread([run["wall_s"] for run in runs], "{:.0f}"),
        (_spread(times, "{:.0f}") if times else "-") + never,
        _spread([run["final_success"] for run in runs], "{:.1%}"),
        f"{statistics.fmean(run['staleness_mean'] for run in runs):.2f}, {max(run['staleness_max'] for run in runs)}",
        f"{sum(run['engine_idle_s'] for run in runs) / total_s:.0%}",
        f"{sum(run['trainer_idle_s'] for run in runs) / total_s:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def _compared(runs: Sequence[Mapping[str, Any]], tools: str, target: float) -> Sequence[str]:
    """Ratios seed by seed, and the difference of the final success with its standard error."""
    sync, other = ({run["seed"]: run for run in _of(runs, tools, schedule)} for schedule in ("sync", "async"))
    seeds = sorted(sync.keys() & other.keys())
    if not seeds:
        return []
    ratios, walls = ([sync[seed][key] / other[seed][key] for seed in seeds] for key in ("train_s", "wall_s"))
    times = [(time_to(sync[seed]["curve"], target), time_to(other[seed]["curve"], target)) for seed in seeds]
    reached = [before / after for before, after in times if before and after]
    gaps = [sync[seed]["final_success"] - other[seed]["final_success"] for seed in seeds]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    return [
        f"{tools}, seconds of sync over those of async to the same number of updates, training: {_listed(ratios)}",
        f"{tools}, the same, wall: {_listed(walls)}",
        f"{tools}, to {target:.0%}: {_listed(reached) if reached else 'not reached by both'}",
        f"{tools}, final success, sync less async: {statistics.fmean(gaps):+.1%}"
        + (f", standard error {error:.1%}" if error is not None else ""),
    ]


def _spread(values: Sequence[float], form: str) -> str:
    mean = form.format(statistics.fmean(values))
    return f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean


def _listed(ratios: Sequence[float]) -> str:
    return f"median {statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
