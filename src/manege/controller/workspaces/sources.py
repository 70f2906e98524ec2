"""Templates of workspaces: folders and archives of this machine. `git` reads repositories.

An identity is a mark, equal as long as nobody touches the source, and a digest of what it holds; who knows both spares
reading it all again. Run in processes of their own (`disk`).
"""

import hashlib
import os
from collections.abc import Sequence

from manege.controller.workspaces.archives import unpack
from manege.controller.workspaces.copying import copy_tree, describe, fingerprint
from manege.errors import HarnessError

__all__ = ["identify", "take"]


def identify(source: str, known: Sequence[str]) -> Sequence[str]:
    """Mark and digest; `known`: what they were before, or nothing. Raises HarnessError, OSError."""
    mark = _mark(source)
    if known and known[0] == mark:
        return known
    if os.path.isdir(source):
        return mark, describe(source)
    with open(source, "rb") as file:
        return mark, hashlib.file_digest(file, "sha256").hexdigest()


def take(source: str, mark: str, target: str) -> None:
    """Put its contents into an empty folder. Raises HarnessError, also if it was changed meanwhile."""
    if os.path.isdir(source):
        copy_tree(source, target, without={".git"})
    else:
        unpack(source, target)
    if _mark(source) != mark:
        raise HarnessError(f"{source} was changed while it was read; the next attempt reads it anew")


def _mark(source: str) -> str:
    if os.path.isdir(source):
        return fingerprint(source)
    try:
        seen = os.stat(source)
    except FileNotFoundError:
        raise HarnessError(
            f"agent.workspace.source = {source!r} does not exist; name a folder, an archive, or a Git repository "
            "together with commit"
        ) from None
    return f"{seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns} {seen.st_ino}"
