"""Where runs are kept: a run folder, a database file, or a database server; and which run of it is meant.

A run is named by its place, and `/NAME` after it where several runs are kept: `runs/finder`, `runs/gateway/NAME`,
`postgresql://user@host/database/NAME`. A folder whose config names a store (`gateway.store`) is read from there.
"""

import difflib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from manege.errors import ConfigError
from manege.store.reading import StoreReader
from manege.trainer.metrics import read_metrics
from manege.types import RunId

__all__ = [
    "STORE",
    "Place",
    "choose",
    "find_place",
    "known_runs",
    "metrics_of",
    "near",
    "opened",
    "pick",
    "places_in",
    "read_config",
]

STORE = "manege.db"
"""As `parts.py` names it in a run folder."""
_Name = TypeVar("_Name", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one or more runs are kept."""

    shown: str
    """For people: no password in it."""
    store: str | Path
    """The database."""
    folder: Path | None
    """With config and metrics; None: only a database."""
    run: str | None
    """The one that is meant; None: the only one."""

    def name_of(self, run_id: RunId, known: Sequence[RunId]) -> str:
        """As other verbs take it. `known`: all runs that are kept here."""
        return self.shown if len(known) == 1 else f"{self.shown}/{run_id}"


def find_place(text: str) -> Place:
    """Raises ConfigError that names near ones."""
    if "://" in text:
        return _of_url(text)
    path = Path(text)
    if place := _of_path(path) or _of_path(path.parent, path.name):
        return place
    known = sorted(each.shown for root in {path, path.parent, Path("runs")} for each in places_in(root))
    raise ConfigError(f"{path} holds no run (no file {STORE})" + near(str(path), known))


def places_in(root: Path) -> Iterator[Place]:
    """Its run folders."""
    for folder in sorted(root.glob("*/")):
        if place := _of_path(folder):
            yield place


async def known_runs(place: Place, reader: StoreReader) -> Sequence[RunId]:
    """Of its rollouts; and of the training whose folder it is, which may have none (any more)."""
    known = list(await reader.run_ids())
    name = read_config(place.folder).get("name") if place.folder else None
    return known if name is None or name in known else [*known, RunId(name)]


def metrics_of(place: Place, run_id: RunId) -> Sequence[Mapping[str, Any]]:
    """Rows of the training whose folder this is; none where there is none."""
    if place.folder is None or read_config(place.folder).get("name") != run_id:
        return []
    return read_metrics(place.folder / "metrics.jsonl")


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[StoreReader]:
    """Its database, for reading."""
    reader = await StoreReader.open(place.store)
    try:
        yield reader
    finally:
        await reader.close()


def choose(place: Place, known: Sequence[RunId]) -> RunId:
    """The run that is meant. Raises ConfigError where that is not clear."""
    if place.run is not None:
        return pick(place.run, known, f"run in {place.shown}")
    if not known:
        raise ConfigError(f"{place.shown} holds no rollouts yet")
    if len(known) > 1:
        shown = ", ".join(f"{place.shown}/{run_id}" for run_id in known[:8])
        raise ConfigError(f"{place.shown} holds {len(known)} runs; name one of them: {shown}")
    return known[0]


def pick(wanted: str, known: Sequence[_Name], what: str) -> _Name:
    """The one that is `wanted`, or the only one that begins so. Raises ConfigError that names near ones."""
    found = [each for each in known if each == wanted] or [each for each in known if each.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"there is no {what} that is or begins with {wanted!r}" + near(wanted, known))
    shown = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
    raise ConfigError(f"{wanted!r} is the beginning of more than one {what}: {shown}")


def near(wanted: str, known: Sequence[str]) -> str:
    """The end of a message."""
    close = difflib.get_close_matches(wanted, known, n=3, cutoff=0)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _of_path(path: Path, run: str | None = None) -> Place | None:
    if path.is_file():
        return Place(shown=str(path), store=path, folder=None, run=run)
    config = read_config(path)
    if store := config.get("gateway", {}).get("store"):
        place = find_place(store) if "://" in store else Place(shown=store, store=store, folder=None, run=None)
        return replace(place, shown=str(path), folder=path, run=run or config["name"])
    if (path / STORE).is_file():
        return Place(shown=str(path), store=path / STORE, folder=path, run=run)
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """Of the training that has this folder; empty where there is none."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _of_url(text: str) -> Place:
    """Only a server's database has no slash in its name."""
    parts, run = urlsplit(text), None
    if parts.netloc:
        database, _, run = parts.path.removeprefix("/").partition("/")
        parts = parts._replace(path=f"/{database}")
    user, at, host = parts.netloc.rpartition("@")
    shown = urlunsplit(parts._replace(netloc=user.partition(":")[0] + at + host, query=""))
    return Place(shown=shown, store=urlunsplit(parts), folder=None, run=run or None)
