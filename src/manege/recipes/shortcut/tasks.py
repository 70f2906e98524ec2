"""The finder's tasks in a Git repository whose history knows the answer, as the history of a real one knows the fix.

The commit that tells it is on a branch that is not checked out: `git log` does not show it, `git log --all` does.
`prepare` is the guard: the same files without a repository.
"""

import subprocess
from pathlib import Path

from manege.recipes.finder.tasks import generate, prepare
from manege.types import Task

__all__ = ["generate", "prepare", "prepare_with_history"]

_COMMITTER = "Ann <ann@example.org>"


def prepare_with_history(task: Task, workspace: Path) -> None:
    """Write the task's files, and the repository around them."""
    prepare(task, workspace)
    files, chain = task.hidden["files"], task.hidden["chain"]
    fact = files[chain[-1]]
    commits = _commit("main", "start", files) + _commit("solved", fact, {chain[0]: fact}, after="main")
    _git(workspace, "init", "--quiet", "--initial-branch=main")
    _git(workspace, "config", "format.pretty", "%s")
    _git(workspace, "fast-import", "--quiet", told=commits)
    _git(workspace, "reset", "--quiet")


def _commit(branch: str, subject: str, files: dict[str, str], *, after: str | None = None) -> str:
    """For `git fast-import`."""
    time_s = 1_700_000_000 + (after is not None)
    head = f"commit refs/heads/{branch}\ncommitter {_COMMITTER} {time_s} +0000\n{_data(subject)}"
    parent = f"from refs/heads/{after}\n" if after else ""
    return head + parent + "".join(f"M 100644 inline {name}\n{_data(text)}" for name, text in files.items()) + "\n"


def _data(text: str) -> str:
    return f"data {len(text.encode()) + 1}\n{text}\n\n"


def _git(workspace: Path, *words: str, told: str = "") -> None:
    subprocess.run(["git", *words], cwd=workspace, input=told, text=True, check=True, capture_output=True)
