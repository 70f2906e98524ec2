"""A finished workspace as a scorer sees it: to write in, with what the agent may not have changed as it was and with
files that the agent never saw; and nothing of it is left afterwards.

In: the finished workspace and the pristine one as layers (`restore.py`), the scorer's settings. Out: a view. With
overlay mounts, only what differs from the finished workspace is written, into a layer of its own on top; without, into
a copy. Either way no link that the agent made is followed: each folder on the way to a file is a real one, or becomes
one. The agent is dead, so nobody changes the tree meanwhile.
"""

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from manege.controller.restore import differences, entries, is_folder, source_of
from manege.sandbox.spec import Overlay

__all__ = ["View", "make_view"]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a scorer works on."""

    place: Path
    """Where it finds the workspace."""
    overlay: Overlay | None
    """To be mounted there; None: it lies there."""
    changed: Sequence[str]
    """Paths that were not as the scorer wants them, and now are."""


def make_view(
    folder: Path,
    finished: Sequence[Path],
    pristine: Sequence[Path],
    *,
    place: Path | None,
    restore: Sequence[str],
    files: Mapping[str, str],
) -> View:
    """In `folder`, which is empty. `place`: an existing folder, where an overlay is mounted; None: make a copy. Raises
    OSError, and RecursionError for folders too deep."""
    changed = differences(finished, pristine, restore)
    if place is None:
        top = folder / "workspace"
        _copy_folder(finished, top)
        surface, overlay = _Surface(root=top, has_layers_below=False), None
    else:
        upper, work = folder / "upper", folder / "work"
        upper.mkdir()
        work.mkdir()
        surface = _Surface(root=upper, has_layers_below=True)
        overlay = Overlay(place=str(place), lower=[str(path) for path in finished], upper=str(upper), work=str(work))
    for difference in changed:
        surface.remove(difference.path)
        if difference.was:
            surface.put(difference.path, difference.was)
    for path, text in files.items():
        surface.write(path, text)
    # Whoever runs Python leaves compiled files.
    told = [difference.path for difference in changed if source_of(difference.path) == difference.path]
    return View(place=place or surface.root, overlay=overlay, changed=told)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surface:
    """The folder that takes what is written."""

    root: Path
    has_layers_below: bool

    def remove(self, path: str) -> None:
        """Whatever it is."""
        self._clear(self._target(path))

    def put(self, path: str, places: Sequence[Path]) -> None:
        """A copy of a file, link or folder."""
        _copy(places, self._free(path))

    def write(self, path: str, text: str) -> None:
        """A file, in place of whatever is there, and of a compiled form that Python would take for it."""
        self._clear(self._target(path).parent / "__pycache__")
        self._free(path).write_text(text, encoding="utf-8")

    def _target(self, path: str) -> Path:
        """With every folder above it a real one."""
        *above, name = PurePosixPath(path).parts
        folder = self.root
        for part in above:
            folder /= part
            if not _is_real_folder(folder):
                was_removed = self.has_layers_below and os.path.lexists(folder)
                _delete(folder)
                folder.mkdir()
                if was_removed:  # else what was removed with it would be seen again
                    os.setxattr(folder, "user.overlay.opaque", b"y")
        return folder / name

    def _free(self, path: str) -> Path:
        target = self._target(path)
        _delete(target)
        return target

    def _clear(self, target: Path) -> None:
        _delete(target)
        if self.has_layers_below:  # what an overlay mount takes for "gone"
            os.mknod(target, stat.S_IFCHR, os.makedev(0, 0))


def _copy(places: Sequence[Path], target: Path) -> None:
    mode = places[0].lstat().st_mode
    if stat.S_ISDIR(mode):
        _copy_folder(places, target)
    elif stat.S_ISLNK(mode):
        target.symlink_to(places[0].readlink())
    elif stat.S_ISREG(mode):
        shutil.copyfile(places[0], target)
        target.chmod(stat.S_IMODE(mode) & 0o777)


def _copy_folder(layers: Sequence[Path], target: Path) -> None:
    """Files, links and folders; a pipe or a socket without its program is nothing."""
    target.mkdir()
    for name, places in entries(layers).items():
        _copy(places, target / name)


def _is_real_folder(path: Path) -> bool:
    return is_folder([path]) if os.path.lexists(path) else False


def _delete(path: Path) -> None:
    if _is_real_folder(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
