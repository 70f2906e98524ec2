"""What differs between the workspace that an agent left and the one that it got, among the paths that a scorer wants
as they were.

In: both as layers, the topmost first, as an overlay mount has them (one layer: a plain folder), and globs. Out: the
paths that differ, each with where it lies in either. Only reads; symbolic links are never followed, since the agent may
have made them. A folder that both have from the same layers is not looked into, so what an agent left untouched in an
overlay costs nothing.
"""

import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Difference", "differences", "entries", "is_folder", "matches", "source_of"]

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A file, link or folder that is not what it was."""

    path: str
    """In the workspace, with slashes; of what is new or gone as a whole, the topmost folder."""
    left: Sequence[Path]
    """Where it lies in what the agent left; a folder may have a part in each layer. Empty: it is gone."""
    was: Sequence[Path]
    """Where it lay before; empty: it is new."""


def differences(left: Sequence[Path], was: Sequence[Path], globs: Sequence[str]) -> Sequence[Difference]:
    """Those whose path, or that of a folder above, matches one of `globs`. Raises OSError for what cannot be read."""
    return list(_walk("", left, was, globs, inside=False)) if globs else []


def matches(glob: str, path: str) -> bool:
    """Whether a path or a folder above it matches: `*` and `?` stand for part of a name, `**` for any folders."""
    return _match(glob.split("/"), path.split("/"))


def source_of(path: str) -> str:
    """Of Python's compiled form the file that it is taken for, of its folder the one above; else the same."""
    above, found, name = f"/{path}".rpartition("/__pycache__")
    if not found:
        return path
    stem = name.removeprefix("/").partition(".")[0]
    return (f"{above}/{stem}.py" if stem else above).removeprefix("/")


def entries(layers: Sequence[Path]) -> dict[str, Sequence[Path]]:
    """What a folder holds that is seen through layers: names, and where each of them lies."""
    found: dict[str, list[Path]] = {}
    closed = set[str]()
    """Names of which the layers below say nothing any more."""
    for layer in layers:
        for entry in _scan(layer):
            if entry.name in closed:
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if not _is_whiteout(entry) and (is_folder or entry.name not in found):
                found.setdefault(entry.name, []).append(Path(entry.path))
            if not is_folder or _attribute(entry.path, "opaque") == b"y":
                closed.add(entry.name)
    return dict(found)


def is_folder(places: Sequence[Path]) -> bool:
    """Of one name's places."""
    return bool(places) and stat.S_ISDIR(places[0].lstat().st_mode)


def _walk(
    path: str, left: Sequence[Path], was: Sequence[Path], globs: Sequence[str], *, inside: bool
) -> Iterator[Difference]:
    """`inside`: a glob matches this folder."""
    left_entries, was_entries = entries(left), entries(was)
    for name in sorted(left_entries.keys() | was_entries.keys()):
        mine, before = left_entries.get(name, ()), was_entries.get(name, ())
        if mine == before:
            continue
        here = f"{path}/{name}" if path else name
        source = source_of(here)
        is_meant = inside or any(matches(glob, source) for glob in globs)
        both = is_folder(mine), is_folder(before)
        if is_meant and not all(both):
            if not _is_same(mine, before):
                yield Difference(path=here, left=mine, was=before)
        elif any(both) and (is_meant or any(_may_lie_below(glob, source) for glob in globs)):
            # A file in place of a folder is a folder without files.
            yield from _walk(here, mine if both[0] else (), before if both[1] else (), globs, inside=is_meant)


def _match(glob: Sequence[str], path: Sequence[str]) -> bool:
    if not glob:
        return True
    if glob[0] == "**":
        return _match(glob[1:], path) or (bool(path) and _match(glob, path[1:]))
    return bool(path) and fnmatch.fnmatchcase(path[0], glob[0]) and _match(glob[1:], path[1:])


def _may_lie_below(glob: str, folder: str) -> bool:
    for part, name in zip(glob.split("/"), folder.split("/"), strict=False):
        if part == "**":
            return True
        if not fnmatch.fnmatchcase(name, part):
            return False
    return True


def _scan(folder: Path) -> Sequence[os.DirEntry[str]]:
    """Also of a folder that the agent locked: it is ours as much as its."""
    try:
        return list(os.scandir(folder))
    except PermissionError:
        folder.chmod(0o700)
        return list(os.scandir(folder))


def _is_whiteout(entry: os.DirEntry[str]) -> bool:
    """How overlay mounts keep that something of a layer below is gone."""
    found = entry.stat(follow_symlinks=False)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def _attribute(path: str, name: str) -> bytes | None:
    """`user` where an ordinary user may mount overlays, else `trusted`."""
    for space in ("user", "trusted"):
        with suppress(OSError):
            return os.getxattr(path, f"{space}.overlay.{name}", follow_symlinks=False)
    return None


def _is_same(mine: Sequence[Path], before: Sequence[Path]) -> bool:
    """Of two that are not both folders."""
    if len(mine) != 1 or len(before) != 1:
        return False
    one, other = mine[0].lstat(), before[0].lstat()
    if stat.S_IFMT(one.st_mode) != stat.S_IFMT(other.st_mode) or one.st_size != other.st_size:
        return False
    if stat.S_ISLNK(one.st_mode):
        return mine[0].readlink() == before[0].readlink()
    return (
        stat.S_ISREG(one.st_mode) and one.st_mode & 0o111 == other.st_mode & 0o111 and _same_bytes(mine[0], before[0])
    )


def _same_bytes(one: Path, other: Path) -> bool:
    with one.open("rb") as mine, other.open("rb") as before:
        while chunk := mine.read(_BLOCK):
            if chunk != before.read(_BLOCK):
                return False
    return True
