"""Where an attempt lives on disk.

`workspaces/<rollout>.<attempt>/` is private and goes when the attempt is over, or when the next controller starts here;
of it the agent may write `workspace`, `home` and `scratch` and read `task.json`. `rollouts/<rollout>/<attempt>/` keeps
what the programs printed.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from manege.logs import get_logger, kv
from manege.types import Rollout, Task

__all__ = ["AttemptFolders", "log_folder", "make_folders", "remove_folder", "remove_left_over", "whole_task"]

_ROOT_NAME = re.compile(r"[^.]+\.\d+(\.control|\.rescore)?")

_log = get_logger("controller")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFolders:
    """The folders and files of one attempt."""

    root: Path
    """Holds all that is private; goes at the end."""
    logs: Path
    """What is kept."""
    uid: int | None = None
    """The user that the agent is outside its sandbox; None: ours."""

    @property
    def workspace(self) -> Path:
        """Where the agent works; empty but for what the setup put there."""
        return self.root / "workspace"

    @property
    def home(self) -> Path:
        """HOME of the agent."""
        return self.root / "home"

    @property
    def scratch(self) -> Path:
        """TMPDIR of the agent."""
        return self.root / "scratch"

    @property
    def task_file(self) -> Path:
        """What the agent may know of its task."""
        return self.root / "task.json"

    @property
    def hidden_task_file(self) -> Path:
        """The whole task, for a setup command; only there while that runs."""
        return self.root / "hidden.json"

    def keep(self) -> None:
        """Move what is private beside the logs instead of removing it."""
        kept = self.logs / "left"
        remove_folder(kept)
        self.root.rename(kept)

    def remove(self) -> None:
        """Delete what is private."""
        remove_folder(self.root)


def make_folders(folder: Path, rollout: Rollout, *, suffix: str = "", uid: int | None = None) -> AttemptFolders:
    """Create the folders of an attempt, empty and ours, with the agent's task file. `suffix` tells a second set apart;
    `uid`: see `AttemptFolders`."""
    name = _file_name(rollout.spec.id)
    folders = AttemptFolders(
        root=folder / "workspaces" / f"{name}.{rollout.attempt}{suffix}",
        logs=log_folder(folder, rollout, suffix=suffix),
        uid=uid,
    )
    folders.remove()
    folders.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (folders.root, folders.workspace, folders.home, folders.scratch):
        path.mkdir(mode=0o700)
    folders.logs.mkdir(parents=True, exist_ok=True)
    task = rollout.spec.task
    folders.task_file.write_text(json.dumps({"id": task.id, "input": task.input}), encoding="utf-8")
    return folders


def log_folder(folder: Path, rollout: Rollout, *, suffix: str = "") -> Path:
    """What is kept of the rollout's last attempt."""
    return folder / "rollouts" / _file_name(rollout.spec.id) / f"{rollout.attempt}{suffix}"


def remove_left_over(folder: Path) -> None:
    """Delete the private folders of attempts whose controller was killed, and nothing that only lies beside them."""
    for root in (folder / "workspaces").glob("*.*"):
        if _ROOT_NAME.fullmatch(root.name) and not root.is_symlink() and (root / "task.json").is_file():
            remove_folder(root)


def whole_task(task: Task) -> str:
    """As JSON, hidden fields included."""
    return json.dumps({"id": task.id, "input": task.input, "hidden": task.hidden})


def _file_name(rollout_id: str) -> str:
    """Ids are the caller's; no id may name another folder."""
    return quote(rollout_id, safe="").replace(".", "%2E")


def remove_folder(root: Path) -> None:
    """Delete a folder, also what programs locked in it. What resists is reported and left."""
    try:
        if root.exists():
            shutil.rmtree(root, onerror=_unlock_and_retry)
    except (OSError, RecursionError) as error:
        _log.warning(kv("folder not removed", folder=root, error=error))


def _unlock_and_retry(function: Callable[..., Any], path: str, _: object) -> None:
    """`function` may be one that needs more than a path: then what failed is a folder."""
    os.chmod(os.path.dirname(path), 0o700)
    if os.path.isdir(path) and not os.path.islink(path):
        os.chmod(path, 0o700)
        shutil.rmtree(path, onerror=_unlock_and_retry)
    else:
        function(path)
