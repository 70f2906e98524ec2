"""Which branches and tags exist: from a list, or by asking repositories."""

import os
import re
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

from manege.curation.rows import Row
from manege.errors import ConfigError

__all__ = ["known_refs", "remote_refs"]

_TIMEOUT_S = 120
"""For one repository: those with tens of thousands of branches answer within seconds."""


def known_refs(path: Path) -> Collection[str]:
    """Of a file, one a line; `refs/heads/x` and the lines of `git ls-remote` name x. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"list of branches {path} cannot be read: {error}") from error
    return {_short(line) for line in lines if line.strip()}


def remote_refs(template: str) -> Callable[[Row], Collection[str]]:
    """Of the repository of a row, each asked once."""
    known: dict[str, Collection[str]] = {}

    def of_row(row: Row) -> Collection[str]:
        remote = re.sub(r"\{(\w+)\}", lambda match: str(row.get(match[1], match[0])), template)
        if remote not in known:
            known[remote] = _ask(remote)
        return known[remote]

    return of_row


def _ask(remote: str) -> Collection[str]:
    """What cannot be asked is an error: else a network that is down would drop all rows."""
    command = ["git", "ls-remote", "--heads", "--tags", "--", remote]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(command)} failed: {error}") from error
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip()}; or list what exists with refs")
    return {_short(line) for line in done.stdout.splitlines()}


def _short(line: str) -> str:
    return re.sub(r"^refs/(heads|tags)/", "", line.split()[-1])
