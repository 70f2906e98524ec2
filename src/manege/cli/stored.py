"""What a run left behind, to look at: its store, also while its training goes on, an export of it, or a gateway.

Only reads. RUN is a place (`places.py`) or the file of an export; with --gateway it is the run's name there.
"""

import argparse
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from manege.cli.arguments import add_gateway_arguments, connect
from manege.cli.places import STORE, Place, choose, find_place, opened
from manege.client import Client
from manege.config import RunConfig, override, parse_config
from manege.errors import ConfigError, NotFoundError
from manege.store.base import Run
from manege.store.exports.jsonl import read_jsonl
from manege.store.exports.parquet import read_parquet
from manege.store.reading import StoreReader
from manege.store.sql import SqlStore
from manege.trainer.collect import Group
from manege.types import Call, CallId, Event, Rollout, RolloutId, RunId

__all__ = ["RUN_HELP", "StoredRun", "add_stored_arguments", "config_of", "find_run", "located", "reading", "stored_run"]

RUN_HELP = "its folder (runs/NAME), its database, FOLDER_OR_DATABASE/NAME where there are several, or an export of it"
_NEEDED: Mapping[str, Any] = {"tasks": {"train": "-"}, "agent": {"run": "-"}, "scorer": {"run": "-"}}
"""Runs of Agent Lightning's clients have no config; nothing that is read here depends on these keys."""
_EXPORTS = {".jsonl": read_jsonl, ".parquet": read_parquet}
_PAGE = 64
"""Rollouts of an export in one transaction."""


class _Source(Protocol):
    """What a store and a gateway's client both answer."""

    async def get_run(self, run_id: RunId) -> Run: ...

    async def calls(self, rollout_ids: Sequence[RolloutId]) -> Mapping[RolloutId, Sequence[Call]]: ...

    async def events(self, rollout_id: RolloutId, *, event_type: str) -> Sequence[Event]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run and its rollouts."""

    id: RunId
    source: _Source
    run: Run | None
    """None: it has no config."""
    rollouts: Sequence[Rollout]
    """Those that ended in the order of completion, then the others."""
    place: Place | None
    """None: a gateway."""

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Raises ConfigError."""
        return config_of(self.id, self.run, overrides)

    async def group(self, rollouts: Sequence[Rollout], *, call_rewards: bool) -> Group:
        """Rollouts of one task with their calls, as the trainer gets them."""
        members = sorted(rollouts, key=lambda rollout: rollout.spec.id)
        calls = await self.source.calls([rollout.spec.id for rollout in members])
        return Group(
            task=members[0].spec.task,
            rollouts=members,
            calls=[calls.get(rollout.spec.id, []) for rollout in members],
            call_rewards=[await self._earned(rollout) for rollout in members if call_rewards],
        )

    async def _earned(self, rollout: Rollout) -> Mapping[CallId, float]:
        events = await self.source.events(rollout.spec.id, event_type="call_reward")
        return {CallId(e.data["call"]): float(e.data["value"]) for e in events if e.attempt == rollout.attempt}


def add_stored_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the run is."""
    parser.add_argument("run", metavar="RUN", help=f"{RUN_HELP}; with --gateway its name there")
    add_gateway_arguments(parser)


@asynccontextmanager
async def stored_run(arguments: argparse.Namespace) -> AsyncIterator[StoredRun]:
    """Raises ConfigError for a run that does not exist, with those that do."""
    if arguments.gateway:
        async with connect(arguments) as client:
            run_id = RunId(arguments.run)
            yield await _read(client, run_id, await _of_gateway(client, run_id), None)
        return
    async with located(arguments.run) as place, opened(place) as reader:
        run_id = choose(place, await reader.run_ids())
        yield await _read(reader, run_id, (await reader.list_rollouts(run=run_id, limit=None)).rollouts, place)


@asynccontextmanager
async def reading(run: str) -> AsyncIterator[tuple[StoreReader, RunId]]:
    """The store that a run is in, and its name there. Raises ConfigError."""
    async with located(run) as place, opened(place) as reader:
        yield reader, choose(place, await reader.run_ids())


@asynccontextmanager
async def located(run: str) -> AsyncIterator[Place]:
    """Where a run is; an export is read into a temporary store. Raises ConfigError, StoreError for a damaged export."""
    path = Path(run)
    if path.suffix not in _EXPORTS or not path.is_file():
        yield find_place(run)
        return
    with tempfile.TemporaryDirectory(prefix="manege-") as folder:
        place = Place(shown=run, store=Path(folder, STORE), folder=None, run=None)
        store = await SqlStore.open(place.store)
        try:
            export = _EXPORTS[path.suffix](path)
            while page := list(islice(export.rollouts, _PAGE)):
                await store.import_rollouts(export.run, page)
        finally:
            await store.close()
        yield place


async def find_run(source: _Source, run_id: RunId) -> Run | None:
    """None: it has no config."""
    try:
        return await source.get_run(run_id)
    except NotFoundError:
        return None


def config_of(run_id: RunId, run: Run | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Raises ConfigError."""
    known = {} if run is None else run.config
    tree = {name: dict(value) if isinstance(value, dict) else value for name, value in known.items()}
    tree = {"name": run_id, **_NEEDED, **tree}
    override(tree, overrides)
    return parse_config(tree, source=f"run {run_id}")


async def _read(source: _Source, run_id: RunId, rollouts: Sequence[Rollout], place: Place | None) -> StoredRun:
    run = await find_run(source, run_id)
    if run is None and not rollouts:
        raise ConfigError(f"run {run_id!r} does not exist, or has no rollouts yet")
    ordered = sorted(rollouts, key=lambda rollout: (rollout.completion is None, rollout.completion or 0))
    return StoredRun(id=run_id, source=source, run=run, rollouts=ordered, place=place)


async def _of_gateway(client: Client, run_id: RunId) -> Sequence[Rollout]:
    """Open ones first: what ends meanwhile is seen as ended."""
    found = {rollout.spec.id: rollout for rollout in await client.open_rollouts(run_id)}
    cursor = 0
    while (page := await client.terminal(run=run_id, after=cursor)).rollouts:
        found |= {rollout.spec.id: rollout for rollout in page.rollouts}
        cursor = page.cursor
    return list(found.values())
