"""Commits of Git repositories, as files alone: no history and no objects that an agent could read the solution from.

A local repository is read in place; of one elsewhere the wanted commit is fetched into a repository that is thrown
away. Submodules are not followed: their folders are empty, as after `git clone`. Needs `git`.
"""

import os
import re
from pathlib import Path

from manege.controller.workspaces.disk import Disk
from manege.errors import HarnessError

__all__ = ["check_out", "is_commit_id", "is_url", "resolve"]

_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0"}
_URL = re.compile(r"[A-Za-z][\w+.-]*://|[^/\s]+@[^/\s]+:")


def is_url(repository: str) -> bool:
    """Whether it lies elsewhere, or is to be read as if it did."""
    return _URL.match(repository) is not None


def is_commit_id(commit: str) -> bool:
    """Whether it names one commit for ever."""
    return re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit) is not None


async def resolve(disk: Disk, repository: str, commit: str, *, scratch: Path, timeout_s: float) -> str:
    """The id of a commit, tag or branch. Raises HarnessError."""
    if is_commit_id(commit):
        return commit
    if not is_url(repository):
        return await _parse(disk, repository, commit, timeout_s)
    return await _parse(disk, await _fetch(disk, repository, commit, scratch, timeout_s), "FETCH_HEAD", timeout_s)


async def check_out(
    disk: Disk, repository: str, commit_id: str, target: Path, *, scratch: Path, timeout_s: float
) -> None:
    """Put a commit's files into an empty folder; `scratch` is the caller's to throw away. Raises HarnessError."""
    if is_url(repository):
        repository = await _fetch(disk, repository, commit_id, scratch, timeout_s)
    env = _ENVIRONMENT | {"GIT_INDEX_FILE": str(scratch / "index"), "GIT_WORK_TREE": str(target)}
    env["GIT_DIR"] = await _git(disk, repository, "rev-parse", "--absolute-git-dir", timeout_s=timeout_s)
    for words in (("read-tree", commit_id), ("checkout-index", "--all", "--quiet")):
        await disk.command(["git", *words], cwd=target, env=env, timeout_s=timeout_s)


async def _parse(disk: Disk, repository: str, commit: str, timeout_s: float) -> str:
    words = ("rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    return await _git(disk, repository, *words, timeout_s=timeout_s)


async def _fetch(disk: Disk, url: str, commit: str, scratch: Path, timeout_s: float) -> str:
    """A repository that has the commit as FETCH_HEAD."""
    if commit.startswith("-"):
        raise HarnessError(f"agent.workspace.commit = {commit!r} is no name of a commit")
    folder = scratch / "repository"
    if not folder.exists():
        await disk.command(["git", "init", "--quiet", "--bare", str(folder)], cwd=scratch, timeout_s=timeout_s)
    await _git(disk, str(folder), "fetch", "--quiet", "--depth=1", "--", url, commit, timeout_s=timeout_s)
    return str(folder)


async def _git(disk: Disk, repository: str, *words: str, timeout_s: float) -> str:
    if not os.path.isdir(repository):
        raise HarnessError(f"agent.workspace.source = {repository!r} is neither a folder nor a URL of a Git repository")
    # So that a folder within a repository is not taken for it.
    env = _ENVIRONMENT | {"GIT_CEILING_DIRECTORIES": os.path.dirname(os.path.realpath(repository))}
    return (await disk.command(["git", *words], cwd=Path(repository), env=env, timeout_s=timeout_s)).strip()
