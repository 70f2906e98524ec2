"""What `manege train` shows: a live panel on a terminal, plain lines elsewhere; NO_COLOR is honoured by rich."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from manege.client import Client
from manege.config import RunConfig
from manege.errors import ManegeError
from manege.types import RunId

__all__ = ["TrainView", "sparkline", "summary"]

_BARS = "▁▂▃▄▅▆▇█"
_POLL_S = 1.0


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """Values between 0 and 1 (others are clamped) as bars, the newest last."""
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int(value * len(_BARS))))] for value in values[-width:])


class TrainView:
    """An Observer of the trainer that also polls the gateway for what runs now."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self._config, self._console = config, console
        self._rows: list[Mapping[str, Any]] = []
        self._phase, self._counts = "starting", {}
        self._live = Live(self, console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> "TrainView":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def on_phase(self, phase: str) -> None:
        """See Observer."""
        self._phase = phase

    def on_row(self, row: Mapping[str, Any]) -> None:
        """See Observer; leaves one line per row behind, so that the history can be read back."""
        self._rows.append(row)
        self._console.print(_line(row), highlight=False, soft_wrap=True)

    async def poll(self, client: Client) -> None:
        """Until cancelled, ask the gateway how many rollouts are in which state."""
        while True:
            with contextlib.suppress(ManegeError):  # the trainer meets the same trouble and reports it
                self._counts = (await client.state(run=RunId(self._config.name)))["rollouts"]
            await asyncio.sleep(_POLL_S)

    def __rich__(self) -> Group:
        steps = [row for row in self._rows if row["kind"] == "step"]
        table = Table.grid(padding=(0, 2))
        total = self._config.train.steps
        last = steps[-1] if steps else None
        table.add_row("step", f"{last['step'] if last else 0} of at most {total}", self._phase)
        if last:
            rewards = [row["reward_mean"] for row in steps]
            rates = [row["success_rate"] for row in steps]
            table.add_row("reward", f"{last['reward_mean']:.3f}", Text(sparkline(rewards), style="cyan"))
            table.add_row("success", f"{last['success_rate']:.0%}", Text(sparkline(rates), style="green"))
            table.add_row("tokens/s", f"{last['tokens_per_s']:.0f}", _time_left(steps, total))
        counts = self._counts
        done = counts.get("succeeded", 0)
        failed = counts.get("failed", 0) + counts.get("cancelled", 0)
        table.add_row(
            "rollouts",
            f"{counts.get('running', 0)} running, {counts.get('queuing', 0)} queued",
            f"{done} done, {failed} failed",
        )
        return Group(Text(f"manege train {self._config.name}", style="bold"), table)


def summary(rows: Sequence[Mapping[str, Any]], config: RunConfig) -> Table:
    """Before and after, and what it took."""
    steps = [row for row in rows if row["kind"] == "step"]
    table = Table(title=f"{config.name}: {len(steps)} steps", title_justify="left", box=SIMPLE_HEAD)
    for column in ("", "before", "after"):
        table.add_column(column)
    for temperature in config.evaluation.temperatures:
        points = [row for row in rows if row["kind"] == "evaluation" and row["temperature"] == temperature]
        full = [row for row in points if row["num_tasks"] == max(point["num_tasks"] for point in points)]
        if full:
            name = "greedy" if temperature == 0 else f"T = {temperature:g}"
            table.add_row(f"held-out, {name}", _rate(full[0]), _rate(full[-1]))
    if steps:
        tokens, calls = (sum(row[name] for row in steps) for name in ("sampled_tokens", "num_calls"))
        unique, total = (sum(row.get(name, 0) for row in steps) for name in ("unique_tokens", "total_tokens"))
        samples = sum(row["num_samples"] for row in steps)
        rollouts = sum(row["num_samples"] / row["samples_per_rollout"] for row in steps if row["num_samples"])
        table.add_row("mean reward of a step", f"{steps[0]['reward_mean']:.3f}", f"{steps[-1]['reward_mean']:.3f}")
        table.add_row("training time", "", f"{steps[-1]['train_s']:.0f} s")
        table.add_row("calls, sampled tokens", "", f"{calls:,}, {tokens:,}")
        table.add_row("samples per rollout", "", f"{samples / max(rollouts, 1):.2f}")
        table.add_row("tokens of samples, computed", "", f"{total:,.0f}, {unique:,.0f}")
    return table


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['success_rate']:.1%} ({row['low']:.0%}-{row['high']:.0%}, n={row['num_tasks']})"


def _time_left(steps: Sequence[Mapping[str, Any]], total: int) -> str:
    """An upper bound: most runs stop before their last step."""
    recent = steps[-5:]
    per_step = sum(row["trainer_idle_s"] + row["update_s"] for row in recent) / len(recent)
    return f"at most {max(0, total - steps[-1]['step']) * per_step / 60:.1f} min left"


def _line(row: Mapping[str, Any]) -> str:
    if row["kind"] == "evaluation":
        name = "greedy" if row["temperature"] == 0 else f"T = {row['temperature']:g}"
        return f"held-out success, {name:8} {_rate(row)}"
    return (
        f"step {row['step']:3}  reward {row['reward_mean']:.3f}  success {row['success_rate']:6.1%}  "
        f"{row['num_calls']:4} calls  {row['tokens_per_s']:3.0f} tok/s  "
        f"{row['trainer_idle_s']:.1f} + {row['update_s']:.1f} s"
    )
