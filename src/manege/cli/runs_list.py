"""The runs in run folders and databases: how far they are, what they cost, and, while they have open work, what waits
the longest.

Without a place it lists all run folders under runs/.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from manege.cli.console import narrow_console
from manege.cli.places import Place, choose, find_place, known_runs, metrics_of, opened, places_in
from manege.errors import ManegeError
from manege.store.base import GatewayState, RunStats
from manege.store.codec import dumps
from manege.types import TERMINAL, Outcome, RunId

_GONE_S = 10.0
"""A gateway that was not seen for so long has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run; also the form of `--json`."""

    run: RunId
    place: str
    """As other verbs take it."""
    stats: RunStats
    success: Mapping[str, Any] | None
    """The last row of metrics: its kind, step and success_rate; None: there is none."""
    oldest_s: Mapping[str, float]
    """Ages of what waits the longest, by kind."""
    moved_s: float | None
    """Seconds since any gateway saw a token, the end of a call or a change of a rollout; None: no gateway lives."""
    gateways: Mapping[str, float]
    """Of its database: seconds since each was last seen."""

    @property
    def num_open(self) -> int:
        """Rollouts that have not ended."""
        return sum(number for state, number in self.stats.states.items() if state not in TERMINAL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this action."""
    parser.add_argument("places", metavar="FOLDER_OR_DATABASE", nargs="*")
    parser.add_argument("--json", action="store_true", help="data on stdout")


async def execute(arguments: argparse.Namespace) -> int:
    """Those that can be read; the others are named, and give exit code 2."""
    rows, code = list[RunRow](), 0
    for place in [find_place(text) for text in arguments.places] or places_in(Path("runs")):
        try:
            rows += await _rows(place)
        except ManegeError as error:
            print(f"{place.shown}: {error}", file=sys.stderr)
            code = 2
    rows.sort(key=lambda row: row.stats.last_s or 0, reverse=True)
    if arguments.json:
        print(dumps([_plain(row) for row in rows]))
        return code
    console = narrow_console()
    if rows:
        console.print(_table(rows))
    else:
        console.print("no runs yet")
    for row in rows:
        if row.num_open:
            console.print(_waiting(row), soft_wrap=True)
    return code


async def _rows(place: Place) -> Sequence[RunRow]:
    async with opened(place) as reader:
        known = await known_runs(place, reader)
        gateways, now_s = await reader.gateways(), time.time()
        alive = [gateway for gateway in gateways if now_s - gateway.seen_s < _GONE_S]
        return [
            RunRow(
                run=run,
                place=place.name_of(run, known),
                stats=await reader.run_stats(run),
                success=_success(place, run),
                oldest_s=_oldest(await reader.pending(run=run), alive, now_s),
                moved_s=min((now_s - gateway.state["progress_s"] for gateway in alive), default=None),
                gateways={gateway.id: now_s - gateway.seen_s for gateway in gateways},
            )
            for run in ([choose(place, known)] if place.run else known)
        ]


def _plain(row: RunRow) -> Mapping[str, Any]:
    """JSON's keys are strings."""
    counts = {name: {str(each): n for each, n in getattr(row.stats, name).items()} for name in ("states", "outcomes")}
    return {**asdict(row), "stats": {**asdict(row.stats), **counts}}


def _success(place: Place, run: RunId) -> Mapping[str, Any] | None:
    rows = metrics_of(place, run)
    return {name: rows[-1][name] for name in ("kind", "step", "success_rate")} if rows else None


def _oldest(since_s: Mapping[str, float], alive: Sequence[GatewayState], now_s: float) -> Mapping[str, float]:
    """Of the run by its database, and of all runs by the gateways that live."""
    ages = {kind: now_s - since for kind, since in since_s.items()}
    for gateway in alive:
        for kind, age_s in gateway.state["oldest"].items():
            ages[kind] = max(ages.get(kind, 0.0), age_s + now_s - gateway.seen_s)
    return ages


def _table(rows: Sequence[RunRow]) -> Table:
    now_s = time.time()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("run", overflow="fold")
    table.add_column("rollouts", no_wrap=True)
    for name in ("reward", "success", "calls", "tokens", "started", "last change"):
        table.add_column(name, no_wrap=True, justify="right")
    for row in rows:
        stats, success = row.stats, row.success
        table.add_row(
            Text(row.place),
            _rollouts(row),
            "-" if stats.reward_mean is None else f"{stats.reward_mean:.3f}",
            "-" if success is None else f"{success['success_rate']:.0%}",
            f"{stats.num_calls:,}",
            f"{stats.sampled_tokens:,}",
            "-" if stats.first_s is None else time.strftime("%m-%d %H:%M", time.localtime(stats.first_s)),
            "-" if stats.last_s is None else f"{age(now_s - stats.last_s)} ago",
        )
    return table


def _rollouts(row: RunRow) -> str:
    outcomes = {outcome: number for outcome, number in row.stats.outcomes.items() if outcome is not Outcome.OK}
    parts = [f"{row.stats.outcomes.get(Outcome.OK, 0)} ok", *(f"{n} {outcome}" for outcome, n in outcomes.items())]
    return "\n".join([", ".join(parts[:2]), *parts[2:], *([f"{row.num_open} open"] if row.num_open else [])])


def _waiting(row: RunRow) -> str:
    """The view of a watchdog."""
    oldest = ", ".join(
        f"{kind} {age(age_s)}" for kind, age_s in sorted(row.oldest_s.items(), key=lambda item: -item[1])
    )
    moved = [] if row.moved_s is None else [f"last moved {age(row.moved_s)} ago"]
    gone = [
        f"gateway {each} gone for {age(silent_s)}" for each, silent_s in row.gateways.items() if silent_s >= _GONE_S
    ]
    return "; ".join([f"{row.place} is open, oldest: {oldest or 'nothing waits'}", *moved, *gone])


def age(seconds: float) -> str:
    """Some time, short."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
