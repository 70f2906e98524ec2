"""What a run left behind, to look at: the store of its folder, also while its training goes on, or a gateway.

Only reads. RUN is a folder (`runs/NAME`), or `FOLDER/NAME` where one folder holds several runs, as a gateway's does;
with --gateway it is the run's name there.
"""

import argparse
import difflib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from manege.cli.arguments import add_gateway_arguments, connect
from manege.client import Client
from manege.config import RunConfig, override, parse_config
from manege.errors import ConfigError, NotFoundError
from manege.store.base import Run
from manege.store.reading import StoreReader
from manege.trainer.collect import Group
from manege.types import Call, CallId, Event, Rollout, RolloutId, RunId

__all__ = ["StoredRun", "add_stored_arguments", "pick", "stored_run"]

STORE = "manege.db"
"""As `parts.py` names it in a run folder."""
_NEEDED: Mapping[str, Any] = {"tasks": {"train": "-"}, "agent": {"run": "-"}, "scorer": {"run": "-"}}
"""Runs of Agent Lightning's clients have no config; nothing that is read here depends on these keys."""
_Name = TypeVar("_Name", bound=str)


class _Source(Protocol):
    """What a folder's store and a gateway's client both answer."""

    async def get_run(self, run_id: RunId) -> Run: ...

    async def calls(self, rollout_ids: Sequence[RolloutId]) -> Mapping[RolloutId, Sequence[Call]]: ...

    async def events(self, rollout_id: RolloutId, *, event_type: str) -> Sequence[Event]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run and its rollouts."""

    id: RunId
    source: _Source
    tree: Mapping[str, Any]
    """The run's config as JSON."""
    rollouts: Sequence[Rollout]
    """Those that ended in the order of completion, then the others."""

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Raises ConfigError."""
        tree = {name: dict(value) if isinstance(value, dict) else value for name, value in self.tree.items()}
        override(tree, overrides)
        return parse_config(tree, source=f"run {self.id}")

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
    parser.add_argument("run", metavar="RUN", help="its folder (runs/NAME); with --gateway its name there")
    add_gateway_arguments(parser)


@asynccontextmanager
async def stored_run(arguments: argparse.Namespace) -> AsyncIterator[StoredRun]:
    """Raises ConfigError for a run that does not exist, with those that do."""
    if arguments.gateway:
        async with connect(arguments) as client:
            run_id = RunId(arguments.run)
            yield await _read(client, run_id, await _of_gateway(client, run_id))
        return
    folder, name = _locate(Path(arguments.run))
    reader = await StoreReader.open(folder / STORE)
    try:
        run_id = _choose(folder, name, await reader.run_ids())
        yield await _read(reader, run_id, (await reader.list_rollouts(run=run_id, limit=None)).rollouts)
    finally:
        await reader.close()


async def _read(source: _Source, run_id: RunId, rollouts: Sequence[Rollout]) -> StoredRun:
    try:
        tree = (await source.get_run(run_id)).config
    except NotFoundError as error:
        if not rollouts:
            raise ConfigError(f"run {run_id!r} does not exist, or has no rollouts yet") from error
        tree = {}
    ordered = sorted(rollouts, key=lambda rollout: (rollout.completion is None, rollout.completion or 0))
    return StoredRun(id=run_id, source=source, tree={"name": run_id, **_NEEDED, **tree}, rollouts=ordered)


async def _of_gateway(client: Client, run_id: RunId) -> Sequence[Rollout]:
    """Open ones first: what ends meanwhile is seen as ended."""
    found = {rollout.spec.id: rollout for rollout in await client.open_rollouts(run_id)}
    cursor = 0
    while (page := await client.terminal(run=run_id, after=cursor)).rollouts:
        found |= {rollout.spec.id: rollout for rollout in page.rollouts}
        cursor = page.cursor
    return list(found.values())


def _locate(path: Path) -> tuple[Path, str | None]:
    """The folder with the store, and the name of the run in it where one was given."""
    if (path / STORE).is_file():
        return path, None
    if (path.parent / STORE).is_file():
        return path.parent, path.name
    known = sorted(str(store.parent) for root in {path, path.parent, Path("runs")} for store in root.glob(f"*/{STORE}"))
    raise ConfigError(f"{path} holds no run (no file {STORE})" + _near(str(path), known))


def _choose(folder: Path, name: str | None, known: Sequence[RunId]) -> RunId:
    if name is not None:
        return pick(name, known, f"run in {folder}")
    if not known:
        raise ConfigError(f"{folder} holds no rollouts yet")
    if len(known) > 1:
        shown = ", ".join(str(folder / run_id) for run_id in known[:8])
        raise ConfigError(f"{folder} holds {len(known)} runs; name one of them: {shown}")
    return known[0]


def pick(wanted: str, known: Sequence[_Name], what: str) -> _Name:
    """The one that is `wanted`, or the only one that begins so. Raises ConfigError that names near ones."""
    found = [each for each in known if each == wanted] or [each for each in known if each.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"there is no {what} that is or begins with {wanted!r}" + _near(wanted, known))
    shown = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
    raise ConfigError(f"{wanted!r} is the beginning of more than one {what}: {shown}")


def _near(wanted: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0)
    return f"; did you mean {' or '.join(near)}?" if near else ""
