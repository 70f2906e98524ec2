"""Delete what runs keep: their rollouts, calls and events, and agents' logs. Metrics, config, model and checkpoints
stay, unless all is asked for.

Without RUN it looks at the runs under runs/, and --keep or --older-than says which of them go. A run in use stays.
"""

import argparse
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from manege.cli.parts import FolderLock
from manege.cli.places import STORE, Place, choose, find_place, known_runs, opened, places_in
from manege.errors import ConfigError, ManegeError
from manege.store.base import RunStats
from manege.store.sql import SqlStore
from manege.types import TERMINAL, RunId

_SECONDS = {"m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doomed:
    """A run that may go."""

    place: Place
    run: RunId
    stats: RunStats
    shown: str
    is_alone: bool
    """Nothing else is in its place."""

    def paths(self, *, whole: bool) -> Iterator[Path]:
        """Files that get smaller or go."""
        folder = self.place.folder
        if folder is not None and self.is_alone:
            yield from folder.rglob("*") if whole else [*folder.glob(f"{STORE}*"), *folder.glob("rollouts/**/*")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this action."""
    parser.add_argument("runs", metavar="RUN", nargs="*")
    parser.add_argument("--keep", type=int, metavar="N", help="all but the N that changed last")
    parser.add_argument("--older-than", type=_seconds, metavar="AGE", help="only those unchanged for 30d, 12h or 90m")
    parser.add_argument("--all", action="store_true", help="with the whole run folder")
    parser.add_argument("--yes", action="store_true", help="without asking")


async def execute(arguments: argparse.Namespace) -> int:
    """Say what would go, ask, and delete."""
    if not arguments.runs and arguments.keep is None and arguments.older_than is None:
        raise ConfigError("name the runs, or say which ones with --keep N or --older-than 30d")
    found = list[_Doomed]()
    for place in [find_place(run) for run in arguments.runs] or places_in(Path("runs")):
        try:
            found += await _runs_of(place, is_named=bool(arguments.runs))
        except ManegeError as error:
            if arguments.runs:
                raise
            print(f"{place.shown} stays: {error}", file=sys.stderr)
    doomed = []
    for each in _chosen(found, arguments.keep, arguments.older_than):
        if reason := _refusal(each, whole=arguments.all):
            if arguments.runs:
                raise ConfigError(f"{each.shown}: {reason}")
            print(f"{each.shown} stays: {reason}", file=sys.stderr)
        else:
            doomed.append(each)
            print(_said(each, whole=arguments.all))
    if not doomed:
        print("nothing to delete")
    elif arguments.yes or _confirmed():
        for each in doomed:
            await _delete(each, whole=arguments.all)
    return 0


async def _runs_of(place: Place, *, is_named: bool) -> Sequence[_Doomed]:
    async with opened(place) as reader:
        known = await known_runs(place, reader)
        return [
            _Doomed(
                place=place,
                run=run,
                stats=await reader.run_stats(run),
                shown=place.name_of(run, known),
                is_alone=len(known) == 1,
            )
            for run in ([choose(place, known)] if is_named else known)
        ]


def _chosen(found: Sequence[_Doomed], keep: int | None, older_than_s: float | None) -> Sequence[_Doomed]:
    newest_first = sorted(found, key=lambda each: each.stats.last_s or 0, reverse=True)
    limit_s = time.time() - (older_than_s or 0)
    return [each for each in newest_first[keep or 0 :] if (each.stats.last_s or 0) <= limit_s]


def _refusal(doomed: _Doomed, *, whole: bool) -> str | None:
    """Why it stays."""
    folder = doomed.place.folder
    if whole and (folder is None or not doomed.is_alone):
        return "--all is for a run folder that holds one run"
    try:
        with _lock(folder):
            pass
    except ConfigError:
        return "it is in use by another manege process"
    num_open = sum(number for state, number in doomed.stats.states.items() if state not in TERMINAL)
    if num_open and not whole:
        end = "; it can go on, or go as a whole with --all" if doomed.is_alone and folder else ""
        return f"{num_open} of its rollouts have not ended{end}"
    return None


async def _delete(doomed: _Doomed, *, whole: bool) -> None:
    place = doomed.place
    with _lock(place.folder):
        if not (whole and place.folder and place.store == place.folder / STORE):
            store = await SqlStore.open(place.store)
            try:
                await store.prune_run(doomed.run)
            finally:
                await store.close()
        if place.folder and doomed.is_alone:
            shutil.rmtree(place.folder if whole else place.folder / "rollouts", ignore_errors=not whole)


def _lock(folder: Path | None) -> AbstractContextManager[None]:
    return FolderLock(folder) if folder else nullcontext()


def _said(doomed: _Doomed, *, whole: bool) -> str:
    size = sum(path.stat().st_size for path in doomed.paths(whole=whole) if path.is_file())
    what = f"{sum(doomed.stats.states.values())} rollouts with {doomed.stats.num_calls} calls"
    rest = ", and all else in the folder" if whole else ""
    return f"{doomed.shown}: {what}{rest}" + (f", {size / 1e6:.1f} MB" if size else "")


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("nothing is deleted without --yes, or an answer from a terminal")
    return input("delete this? [y/N] ").strip().lower() in ("y", "yes")


def _seconds(text: str) -> float:
    if not (found := re.fullmatch(r"(\d+)([mhd])", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no age; write 30d, 12h or 90m")
    return int(found[1]) * _SECONDS[found[2]]
