"""Runs side by side: the settings that differ, and what they learnt at what price.

`train s to X` is the training time until the mean success of three steps reached what all of them reached.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from manege.cli.console import narrow_console
from manege.cli.places import choose, known_runs, metrics_of, opened, read_config
from manege.cli.stored import RUN_HELP, find_run, located
from manege.store.base import RunStats
from manege.store.codec import dumps

_WINDOW = 3
"""Steps over which success is averaged, as for `train.stop_success`."""
_OF_NO_RUN = ("name", "folder", "gateway.store")
"""Keys that say where a run is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """One of the runs."""

    name: str
    config: Mapping[str, Any]
    """Dotted keys."""
    stats: RunStats
    rows: Sequence[Mapping[str, Any]]
    """Of its metrics."""

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        """Updates."""
        return [row for row in self.rows if row["kind"] == "step"]

    def rates(self) -> Sequence[float]:
        """Success after each step, over the last three."""
        rates = [row["success_rate"] for row in self.steps]
        return [sum(rates[end - _WINDOW : end]) / _WINDOW for end in range(_WINDOW, len(rates) + 1)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this action."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="data on stdout")


async def execute(arguments: argparse.Namespace) -> int:
    """Print the table."""
    runs = [await _look_at(run) for run in arguments.runs]
    differences = _differences(runs)
    numbers = _numbers(runs)
    if arguments.json:
        print(dumps({"runs": [run.name for run in runs], "config": differences, "numbers": numbers}))
        return 0
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right", overflow="fold")
    for key, values in {**differences, **numbers}.items():
        table.add_row(Text(key), *(Text(_shown(value)) for value in values))
    narrow_console().print(table)
    return 0


async def _look_at(text: str) -> _Compared:
    async with located(text) as place, opened(place) as reader:
        run_id = choose(place, await known_runs(place, reader))
        run = await find_run(reader, run_id)
        kept = read_config(place.folder) if place.folder else {}
        return _Compared(
            name=text,
            config=dict(_flat(kept if run is None else run.config)),
            stats=await reader.run_stats(run_id),
            rows=metrics_of(place, run_id),
        )


def _flat(tree: Mapping[str, Any], lead: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{lead}{key}.")
        else:
            yield f"{lead}{key}", value


def _differences(runs: Sequence[_Compared]) -> Mapping[str, Sequence[Any]]:
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _OF_NO_RUN)
    found = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _numbers(runs: Sequence[_Compared]) -> Mapping[str, Sequence[Any]]:
    """By their names; None where a run has none."""
    found: dict[str, Sequence[Any]] = {
        "rollouts": [sum(run.stats.states.values()) for run in runs],
        "mean reward": [run.stats.reward_mean for run in runs],
        "calls": [run.stats.num_calls for run in runs],
        "sampled tokens": [run.stats.sampled_tokens for run in runs],
        "steps": [len(run.steps) or None for run in runs],
    }
    temperatures = {row["temperature"]: None for run in runs for row in run.rows if row["kind"] == "evaluation"}
    for temperature in temperatures:
        for which, index in (("first", 0), ("last", -1)):
            found[f"held-out success, T = {temperature:g}, {which}"] = [
                rates[index] if (rates := _evaluated(run, temperature)) else None for run in runs
            ]
    found["reward of the last step"] = [run.steps[-1]["reward_mean"] if run.steps else None for run in runs]
    found["samples per rollout"] = [_samples(run) for run in runs]
    found["train s"] = [run.steps[-1]["train_s"] if run.steps else None for run in runs]
    best = [max(run.rates(), default=None) for run in runs]
    found["best success"] = best
    trained = [rate for rate in best if rate is not None]
    if trained:
        found[f"train s to {min(trained):.1%}"] = [_seconds_to(run, min(trained)) for run in runs]
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _evaluated(run: _Compared, temperature: float) -> Sequence[float]:
    """Success of whole evaluations: those during training may have fewer tasks."""
    rows = [row for row in run.rows if row["kind"] == "evaluation" and row["temperature"] == temperature]
    most = max((row["num_tasks"] for row in rows), default=0)
    return [row["success_rate"] for row in rows if row["num_tasks"] == most]


def _samples(run: _Compared) -> float | None:
    counted = [row for row in run.steps if row["num_samples"]]
    rollouts = sum(row["num_samples"] / row["samples_per_rollout"] for row in counted)
    return sum(row["num_samples"] for row in counted) / rollouts if counted else None


def _seconds_to(run: _Compared, target: float) -> float | None:
    for rate, row in zip(run.rates(), run.steps[_WINDOW - 1 :], strict=True):
        if rate >= target:
            return row["train_s"]
    return None


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)
