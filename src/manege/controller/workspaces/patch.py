"""What an agent changed in its workspace, as a patch against the commit or the template that it began from.

As a developer's own `git add -A` would see it: what the workspace's `.gitignore` names is left out unless it was in the
commit. So is what setup commands made, whatever the agent did to it: it is not in the commit, so that no patch of it
would apply; what they changed of the commit's own files counts as the agent's. Nothing of the workspace decides how it
is read: its `.git` and its attributes count for nothing. Needs `git`.
"""

import re
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from manege.config import WorkspaceConfig
from manege.controller.workspaces.cache import Workspaces
from manege.controller.workspaces.disk import Disk
from manege.sandbox.launcher import Launcher
from manege.types import Task

__all__ = ["patch_of"]

_PLAIN = "* -text -filter -ident -working-tree-encoding !diff\n"
_BINARY = "* -text -filter -ident -working-tree-encoding -diff\n"
_REPLACED = "\ufffd"
"""Stands for bytes that are no UTF-8."""


async def patch_of(
    launcher: Launcher, prepared: Path, config: WorkspaceConfig, task: Task, left: Path, *, timeout_s: float
) -> str:
    """In Git's format, for `git apply`; empty: nothing changed. `prepared`: the folder of prepared workspaces; `left`:
    the workspace as the agent left it. Raises HarnessError."""
    async with AsyncExitStack() as stack:
        workspaces = Workspaces(prepared, launcher)

        async def begun(config: WorkspaceConfig) -> Path:
            found = workspaces.prepare(config, task, timeout_s=timeout_s)
            return (await stack.enter_async_context(found)).folder

        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="manege-")))
        trees = _Trees(Disk(launcher), scratch, timeout_s)
        await trees.git(scratch, "init", "--quiet")
        before = await trees.add(await begun(config.model_copy(update={"setup": []})), "--force")
        if config.setup:
            await trees.ignore_others(await begun(config))
        return await trees.difference(before, await trees.add(left))


class _Trees:
    """Folders as trees of a repository that is thrown away, one after the other in one index."""

    def __init__(self, disk: Disk, scratch: Path, timeout_s: float) -> None:
        self._disk, self._scratch, self._timeout_s = disk, scratch, timeout_s
        self.repository = scratch / "repository"

    async def git(self, folder: Path, *words: str) -> str:
        """What `git` prints, in a folder."""
        env = {"GIT_DIR": str(self.repository), "GIT_WORK_TREE": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
        env |= {"GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(self._scratch)}
        return await self._disk.command(["git", *words], cwd=folder, env=env, timeout_s=self._timeout_s)

    async def add(self, folder: Path, *options: str) -> str:
        """The tree of a folder, with what is tracked from the one before."""
        self._attributes(_PLAIN)
        await self.git(folder, "-c", "core.fileMode=true", "add", "--all", *options, "--", ".")
        return (await self.git(folder, "write-tree")).strip()

    async def ignore_others(self, folder: Path) -> None:
        """From now on, what a folder has beyond what is tracked."""
        found = await self.git(folder, "ls-files", "--others", "--exclude-standard", "--directory", "-z")
        lines = ["/" + re.sub(r"([\\\\*?\[\]# !])", r"\\\1", name) for name in found.split("\0") if name]
        (self.repository / "info" / "exclude").write_text("\n".join(lines) + "\n", encoding="utf-8")

    async def difference(self, before: str, after: str) -> str:
        """Files that are no UTF-8 are written as Git writes binary ones, in letters that every reader understands."""
        words = ("diff", "--binary", "--no-color", "--no-ext-diff", "--no-renames", "--full-index", before, after)
        patch = await self.git(self._scratch, *words)
        if _REPLACED in patch:
            self._attributes(_BINARY)
            patch = await self.git(self._scratch, *words)
        return patch

    def _attributes(self, text: str) -> None:
        """They come before any `.gitattributes`."""
        (self.repository / "info").mkdir(exist_ok=True)
        (self.repository / "info" / "attributes").write_text(text, encoding="utf-8")
