"""Prepared workspaces: made once for equal contents and setup commands, lent to any number of attempts.

`<folder>/<digest>/workspace` is what was prepared, beside `size`, its bytes on disk. A folder of another name is being
made and becomes one of these by a rename, so that none is ever half. Who uses one, or makes one, holds a lock (flock)
on its folder: shared or alone. Whoever gets a lock alone may remove the folder, so what a killed controller left goes
with the next clearing, and several controllers may share a folder.

All attempts that want the same at once wait for one preparation; if it fails, all of them fail, and the next one tries
again.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from manege.config import WorkspaceConfig
from manege.controller.environment import fill_from
from manege.controller.folders import AttemptFolders, remove_folder
from manege.controller.workspaces import git, layers
from manege.controller.workspaces.copying import copy_tree, seal
from manege.controller.workspaces.disk import Disk
from manege.controller.workspaces.sources import identify, take
from manege.errors import HarnessError
from manege.sandbox.launcher import Launcher
from manege.sandbox.layers import Layers
from manege.sandbox.spec import Overlay
from manege.types import Task

__all__ = ["Prepared", "Workspaces"]

_KEPT_BYTES = 20 << 30
"""Of prepared workspaces that nobody uses, the most recently used ones: a hundred of 200 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a workspace holds before anybody works in it; nobody may write to it."""

    folder: Path
    digest: str
    """Of its contents and the setup commands."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    source: str
    commit: str | None
    setup: Sequence[Sequence[str]]


class _Making:
    """A preparation under way, and how many wait for it."""

    def __init__(self, task: asyncio.Task[str]) -> None:
        self.task = task
        self.num_waiting = 0


class Workspaces:
    """Of one controller."""

    def __init__(self, folder: Path, launcher: Launcher, *, kept_bytes: int = _KEPT_BYTES) -> None:
        """`folder`: for prepared workspaces alone."""
        self._folder, self._disk, self._kept_bytes = folder, Disk(launcher), kept_bytes
        self._making: dict[_Wanted, _Making] = {}
        self._identities: dict[str, Sequence[str]] = {}
        """Mark and digest of each source that was read."""
        self._commits: dict[tuple[str, str], str] = {}
        """Branches and tags are looked up once, so that all rollouts begin alike."""

    @asynccontextmanager
    async def prepare(self, config: WorkspaceConfig, task: Task, *, timeout_s: float) -> AsyncIterator[Prepared]:
        """The prepared workspace of a task, kept as long as the context lasts. Raises HarnessError."""
        wanted = _wanted(config, task)
        while True:
            digest = await self._digest(wanted, timeout_s)
            with _locked(self._folder / digest, fcntl.LOCK_SH) as is_there:
                if is_there:  # else it was just removed to make room
                    os.utime(self._folder / digest)
                    yield Prepared(folder=self._folder / digest / "workspace", digest=digest)
                    return

    async def place(
        self, prepared: Prepared, folders: AttemptFolders, machine: Layers, *, timeout_s: float
    ) -> Overlay | None:
        """What makes an attempt's workspace begin as it was prepared: an overlay, for all process trees that work in
        it, or where the machine has none (None) a copy that is there at once. Raises HarnessError."""
        if machine.overlay:
            return layers.over(prepared.folder, folders)
        await self._disk.call(copy_tree, str(prepared.folder), str(folders.workspace), timeout_s=timeout_s)
        return None

    async def materialise(self, seen: Sequence[str], target: Path, *, timeout_s: float) -> None:
        """Copy what layers show together (`layers.finished`), into an empty folder. Raises HarnessError."""
        await self._disk.call(layers.merge, list(seen), str(target), timeout_s=timeout_s)

    async def _digest(self, wanted: _Wanted, timeout_s: float) -> str:
        """Prepare it, or find it prepared."""
        making = self._making.get(wanted)
        if making is None:
            task = asyncio.create_task(self._prepare(wanted, timeout_s), name=f"prepare {wanted.source}")
            making = self._making[wanted] = _Making(task)
        making.num_waiting += 1
        try:
            return await asyncio.shield(making.task)
        finally:
            making.num_waiting -= 1
            if making.task.done() or not making.num_waiting:
                making.task.cancel()
                if self._making.get(wanted) is making:
                    del self._making[wanted]
                await asyncio.wait({making.task})

    async def _prepare(self, wanted: _Wanted, timeout_s: float) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                return await self._find_or_make(wanted, timeout_s)
        except TimeoutError as error:
            raise HarnessError(
                f"workspace {wanted.source} was not prepared within {timeout_s:g} s (agent.limits.setup_s)"
            ) from error

    async def _find_or_make(self, wanted: _Wanted, timeout_s: float) -> str:
        with _made_in(self._folder) as made:
            workspace, scratch = made / "workspace", made / "scratch"
            workspace.mkdir()
            scratch.mkdir()
            mark, content = await self._identify(wanted, scratch, timeout_s)
            digest = hashlib.sha256(json.dumps([content, wanted.setup]).encode()).hexdigest()
            if (self._folder / digest).is_dir():
                return digest
            if wanted.commit is None:
                await self._disk.call(take, wanted.source, mark, str(workspace), timeout_s=timeout_s)
            else:
                await git.check_out(self._disk, wanted.source, content, workspace, scratch=scratch, timeout_s=timeout_s)
            for command in wanted.setup:
                await self._disk.command(command, cwd=workspace, timeout_s=timeout_s)
            num_bytes = await self._disk.call(seal, str(workspace), timeout_s=timeout_s)
            (made / "size").write_text(str(num_bytes), encoding="utf-8")
            await asyncio.to_thread(remove_folder, scratch)
            _rename(made, self._folder / digest)
        await asyncio.to_thread(self._clear)
        return digest

    async def _identify(self, wanted: _Wanted, scratch: Path, timeout_s: float) -> Sequence[str]:
        """A mark, equal until the source is changed, and what tells its contents from others."""
        source, commit = wanted.source, wanted.commit
        if commit is None:
            known = self._identities.get(source, ())
            found = await self._disk.call(identify, source, known, timeout_s=timeout_s)
            self._identities[source] = found
            return found
        if (source, commit) not in self._commits:
            resolved = await git.resolve(self._disk, source, commit, scratch=scratch, timeout_s=timeout_s)
            self._commits[source, commit] = resolved
        return "", self._commits[source, commit]

    def _clear(self) -> None:
        """Remove what was left half, and of the rest, what nobody uses, the least recently used ones beyond the
        bound."""
        num_bytes = 0
        for _, entry, size in sorted(map(_known, self._folder.iterdir()), reverse=True):
            num_bytes += size or 0
            if size is None or num_bytes > self._kept_bytes:
                with _locked(entry, fcntl.LOCK_EX) as is_ours:
                    if is_ours:
                        _remove(entry)


def _wanted(config: WorkspaceConfig, task: Task) -> _Wanted:
    def filled(template: str, name: str) -> str:
        setting = f"agent.workspace.{name}"
        return fill_from(template, task.input, setting=setting, source="the task's input")

    source = filled(config.source, "source")
    if not (os.path.isabs(source) or git.is_url(source)):
        raise HarnessError(f"agent.workspace.source = {source!r} must be an absolute path, or the URL of a repository")
    commit = None if config.commit is None else filled(config.commit, "commit")
    setup = tuple(tuple(command) for command in config.setup)
    return _Wanted(source, commit, setup)


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[bool]:
    """Hold a lock on a folder that is still there. False: it is not, or somebody holds another one."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        # Its holder before us may have removed or renamed it.
        is_there = folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())
    except BlockingIOError:
        is_there = False
    try:
        yield is_there
    finally:
        os.close(descriptor)


@contextmanager
def _made_in(parent: Path) -> Iterator[Path]:
    """A new folder that is ours alone while it is being made; it is gone afterwards unless it got another name."""
    made = Path(tempfile.mkdtemp(dir=parent, prefix="making-"))
    with _locked(made, fcntl.LOCK_EX) as is_ours:
        if not is_ours:
            raise HarnessError(f"workspace: {made} was cleared by another controller; the next attempt makes it anew")
        try:
            yield made
        finally:
            if made.exists():
                _remove(made)


def _rename(made: Path, place: Path) -> None:
    try:
        made.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        # Another controller was faster.


def _known(entry: Path) -> tuple[float, Path, int | None]:
    """When it was last used, itself, and its bytes; None: it is not whole, or is just being removed."""
    try:
        return entry.stat().st_mtime, entry, int((entry / "size").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0.0, entry, None


def _remove(entry: Path) -> None:
    """By its holder. First it loses its name, so that nobody takes it for whole meanwhile."""
    gone = entry.with_name(f"gone-{secrets.token_hex(4)}")
    entry.rename(gone)
    remove_folder(gone)
