"""Trees of files, copied, described and sealed. Run in processes of their own: they read and write without a pause.

No hard links anywhere: two folders that shared a file would both change when somebody writes to it in place, and in all
of the folders here somebody may: the user in a template, setup commands in a prepared folder, an agent in its own.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from manege.errors import HarnessError

__all__ = ["copy_file", "copy_tree", "describe", "fingerprint", "seal", "walk"]

_RIGHTS = 0o777
"""Kept of a mode: a program that others own must not run as its owner (setuid)."""
_WRITE_OF_OTHERS = 0o022


def walk(root: str, *, without: Collection[str] = ()) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All entries below a folder, by their relative path, a folder before what is in it; links are not followed.
    `without`: names that are left out wherever they are."""
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name in without:
                    continue
                path = os.path.join(folder, entry.name)
                yield path, entry
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)


def fingerprint(root: str) -> str:
    """Equal as long as nobody touches a file or the tree below a folder (its `.git` apart): names, kinds, sizes and
    times of change, which nobody can set."""
    found = hashlib.sha256()
    for path, entry in _of_source(root):
        seen = entry.stat(follow_symlinks=False)
        # A folder changes when something enters or leaves it, its `.git` too: what it holds is seen by itself.
        touched = () if stat.S_ISDIR(seen.st_mode) else (seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino)
        found.update(repr((path, seen.st_mode, *touched)).encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def describe(root: str) -> str:
    """A digest of all that a copy of the tree would hold."""
    found = hashlib.sha256()
    for path, entry in _of_source(root):
        if entry.is_symlink():
            kind, content = "link", os.readlink(entry.path).encode("utf-8", "surrogateescape")
        elif entry.is_dir(follow_symlinks=False):
            kind, content = "folder", b""
        else:
            with open(entry.path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            kind = "program" if entry.stat().st_mode & stat.S_IXUSR else "file"
        found.update(repr((path.encode("utf-8", "surrogateescape"), kind, content)).encode())
    return found.hexdigest()


def copy_tree(source: str, target: str, *, without: Collection[str] = ()) -> None:
    """Into a folder that exists. Pipes, sockets and devices are left out: nobody could read them."""
    for path, entry in walk(source, without=without):
        place = os.path.join(target, path)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), place)
        elif entry.is_dir(follow_symlinks=False):
            os.mkdir(place, 0o700)
            os.chmod(place, _mode(entry) | stat.S_IRWXU)
        elif entry.is_file(follow_symlinks=False):
            copy_file(entry.path, place)


def copy_file(source: str, target: str) -> None:
    """A new file with the content, mode and time of another. File systems that can share blocks (XFS, Btrfs) do so for
    copy_file_range, and the copy then costs no space; the others copy within the kernel."""
    with open(source, "rb") as reading, open(target, "xb") as writing:
        seen = os.fstat(reading.fileno())
        try:
            while os.copy_file_range(reading.fileno(), writing.fileno(), 1 << 30):
                pass
        except OSError:  # between file systems that know nothing of each other
            shutil.copyfileobj(reading, writing)
        os.fchmod(writing.fileno(), seen.st_mode & _RIGHTS)
        writing.flush()
        os.utime(writing.fileno(), ns=(seen.st_atime_ns, seen.st_mtime_ns))


def seal(root: str) -> int:
    """Nobody but us may write below the folder, and a power cut takes nothing of it; returns the bytes that it takes on
    disk."""
    num_bytes = 0
    os.chmod(root, 0o755)
    for _, entry in walk(root):
        seen = entry.stat(follow_symlinks=False)
        is_folder = entry.is_dir(follow_symlinks=False)
        num_bytes += seen.st_blocks * 512 // (1 if is_folder else seen.st_nlink)
        if not entry.is_symlink():
            os.chmod(entry.path, seen.st_mode & _RIGHTS & ~_WRITE_OF_OTHERS | (stat.S_IRWXU if is_folder else 0))
    os.sync()
    return num_bytes


def _of_source(root: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """What is taken over of a template. Raises HarnessError for what cannot be."""
    for path, entry in sorted(walk(root, without={".git"}), key=lambda found: found[0]):
        if not (entry.is_symlink() or entry.is_dir() or entry.is_file()):
            raise HarnessError(f"{os.path.join(root, path)} is no file, folder or link; take it out of {Path(root)}")
        yield path, entry


def _mode(entry: os.DirEntry[str]) -> int:
    return entry.stat(follow_symlinks=False).st_mode & _RIGHTS
