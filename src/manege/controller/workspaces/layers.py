"""An attempt's view of its workspace: what was prepared, below, and what the attempt changed, in a folder of its own.

The kernel's overlay file system shows them as one (https://docs.kernel.org/filesystems/overlayfs.html); what was
deleted is a whiteout in the upper folder, a folder that was replaced is marked opaque. Folders that are renamed are
copied by who renames them: such overlays record no renames.
"""

import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from manege.controller.folders import AttemptFolders
from manege.controller.workspaces.copying import copy_file
from manege.sandbox.spec import Overlay

__all__ = ["finished", "merge", "over"]

_OPAQUE = "user.overlay.opaque"
"""Written by overlays that are mounted with `userxattr`, as ours are; within one, an agent cannot write it."""


def over(prepared: Path, folders: AttemptFolders) -> Overlay:
    """Make the folders that an attempt's overlay needs, beside its workspace."""
    upper, work = folders.root / "upper", folders.root / "work"
    for folder in (upper, work):
        folder.mkdir(mode=0o700)
    return Overlay(place=str(folders.workspace), lower=[str(prepared)], upper=str(upper), work=str(work))


def finished(folders: AttemptFolders, overlay: Overlay | None) -> Sequence[str]:
    """The folders that together show what an attempt left, the topmost first; for another overlay, or to merge."""
    return [str(folders.workspace)] if overlay is None else [overlay.upper, *overlay.lower]


def merge(layers: Sequence[str], target: str) -> None:
    """Copy what layers show together, the topmost first, into an empty folder. Run in a process of its own."""
    for layer in reversed(layers):
        _put(layer, target)


def _put(layer: str, target: str) -> None:
    """One layer over what is in the target."""
    with os.scandir(layer) as entries:
        for entry in entries:
            place = os.path.join(target, entry.name)
            is_folder = entry.is_dir(follow_symlinks=False)
            mode = _unlock(entry)
            if not is_folder or _is_opaque(entry.path):
                _clear(place)
            if is_folder:
                _put_folder(entry.path, place, mode)
            elif entry.is_symlink():
                os.symlink(os.readlink(entry.path), place)
            elif entry.is_file():
                copy_file(entry.path, place)
            # Pipes, sockets and devices are left out; a whiteout is a device.


def _put_folder(folder: str, place: str, mode: int) -> None:
    if os.path.islink(place) or not os.path.isdir(place):
        _clear(place)
        os.mkdir(place)
    _put(folder, place)
    os.chmod(place, mode)


def _unlock(entry: os.DirEntry[str]) -> int:
    """The mode of a file or folder that we can read from now on, whatever the agent did to it."""
    mode = stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode)
    if entry.is_dir(follow_symlinks=False):
        mode |= stat.S_IRWXU
    elif entry.is_file(follow_symlinks=False):
        mode |= stat.S_IRUSR
    else:
        return mode
    if mode != stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode):
        os.chmod(entry.path, mode)
    return mode


def _clear(place: str) -> None:
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place)
    elif os.path.lexists(place):
        os.unlink(place)


def _is_opaque(folder: str) -> bool:
    return _OPAQUE in os.listxattr(folder)
