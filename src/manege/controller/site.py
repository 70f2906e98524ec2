"""Where an attempt works: its private folders, with all that the workspace holds before the agent begins.

In: a rollout and its run. Out: a site, made from `agent.workspace` and then by `agent.setup`, for as long as the
context lasts; then it goes, or what is in it is kept beside the logs. Where the machine has user ids to give, one is
lent to the attempt (`AttemptFolders.uid`); `give` makes the folders its own.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from manege.config import AgentConfig, RunConfig
from manege.controller.environment import system_environment
from manege.controller.folders import AttemptFolders, make_folders, remove_folder, whole_task
from manege.controller.workspaces.cache import Workspaces
from manege.controller.workspaces.layers import finished
from manege.errors import HarnessError
from manege.logs import get_logger, kv
from manege.sandbox import uids
from manege.sandbox.launcher import Launcher
from manege.sandbox.layers import Layers
from manege.sandbox.spec import Limits, Overlay, ProcessSpec
from manege.types import Rollout

__all__ = ["Site", "Sites"]

_TAIL_CHARS = 2000
"""Of a setup's output, in messages."""

_log = get_logger("controller")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Of one attempt."""

    folders: AttemptFolders
    overlay: Overlay | None
    """Over `folders.workspace`, for all that works in it; None: what the workspace holds lies there."""

    @property
    def layers(self) -> Sequence[Path]:
        """The folders that together show the workspace as it is now, the topmost first."""
        return [Path(path) for path in finished(self.folders, self.overlay)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """Of a controller."""

    launcher: Launcher
    folder: Path
    """The run folder."""
    layers: Layers
    workspaces: Workspaces
    keep: bool
    """Whether what agents left behind is kept."""

    @asynccontextmanager
    async def make(self, rollout: Rollout, config: RunConfig, *, suffix: str = "") -> AsyncIterator[Site]:
        """`suffix` tells a second site of an attempt apart. Raises HarnessError when it cannot be made: that is not the
        agent's fault."""
        agent, task = config.agent, rollout.spec.task
        async with AsyncExitStack() as stack:
            uid = stack.enter_context(uids.lease()) if self.layers.uids and self.layers.namespaces else None
            folders = make_folders(self.folder, rollout, suffix=suffix, uid=uid)
            site = Site(folders=folders, overlay=None)
            try:
                if agent.workspace is not None:
                    limit_s = agent.limits.setup_s
                    prepare = self.workspaces.prepare(agent.workspace, task, timeout_s=limit_s)
                    prepared = await stack.enter_async_context(prepare)
                    overlay = await self.workspaces.place(prepared, folders, self.layers, timeout_s=limit_s)
                    site = replace(site, overlay=overlay)
                if agent.setup is not None:
                    await self._set_up(rollout, agent.setup, agent, site)
                yield site
            finally:
                await asyncio.shield(self._leave(site, agent))

    async def give(self, site: Site) -> None:
        """To the attempt's user, with all that is in them by now."""
        if site.folders.uid is not None:
            await asyncio.to_thread(uids.own, [str(site.folders.root)], site.folders.uid)

    async def _set_up(self, rollout: Rollout, program: str | list[str], agent: AgentConfig, site: Site) -> None:
        folders, task = site.folders, rollout.spec.task
        log = folders.logs / "setup.txt"
        folders.hidden_task_file.write_text(whole_task(task), encoding="utf-8")
        spec = ProcessSpec(
            program=program,
            role="setup",
            env={
                **system_environment(home=str(Path.home()), scratch=str(folders.scratch)),
                "MANEGE_ROLLOUT_ID": rollout.spec.id,
                "MANEGE_TASK_FILE": str(folders.hidden_task_file),
            },
            cwd=str(folders.workspace),
            stdout=str(log),
            stderr=str(log),
            limits=Limits(),
            policy=None,
            overlay=site.overlay,
            args=(task, folders.workspace),
        )
        ended = await self.launcher.run(spec, agent.limits.setup_s)
        folders.hidden_task_file.unlink(missing_ok=True)
        if ended.timed_out:
            raise HarnessError(f"the setup did not end within {agent.limits.setup_s:g} s (agent.limits.setup_s)")
        if ended.code != 0:
            said = log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARS:].strip()
            raise HarnessError(f"the setup failed with {ended.how}: {said or 'it printed nothing'}")

    async def _leave(self, site: Site, agent: AgentConfig) -> None:
        """Keep or remove it; what resists is reported and left."""
        folders, limit_s = site.folders, agent.limits.cleanup_s
        try:
            if self.keep:
                if site.overlay is not None:
                    seen = [str(path) for path in site.layers]
                    await self.workspaces.materialise(seen, folders.workspace, timeout_s=limit_s)
                    for layer in (site.overlay.upper, site.overlay.work):
                        await asyncio.to_thread(remove_folder, Path(layer))
                if folders.uid is not None:
                    await asyncio.to_thread(uids.own, [str(folders.root)], os.getuid())
                folders.keep()
            else:
                await asyncio.wait_for(asyncio.to_thread(folders.remove), limit_s)
        except TimeoutError:
            _log.warning(kv("workspace still being removed", folder=folders.root, after_s=limit_s))
        except (HarnessError, OSError) as error:
            _log.warning(kv("workspace not kept", folder=folders.root, error=error))
