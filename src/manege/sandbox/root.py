"""The root of a sandboxed program: an empty file system that shows what the policy lists, at the same paths as outside.

In: what may be read, written, and what is hidden inside of it. `plan` (pure) says which mounts that takes, few, since
each costs time; `build` makes them, in a mount namespace of this process's own. What is not listed is not there at all;
what is hidden inside something listed can be neither read nor listed. Everything is read-only but what may be written.
"""

import errno
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from manege.sandbox.mounts import bind, mount, mount_terminals, pivot, protect, unmount

__all__ = ["Access", "Place", "build", "plan", "resolve"]

_BASE = "/tmp"
"""Where the new root is mounted for a moment; any folder that every machine has."""
_OUTSIDE = "/.outside"
"""The old root, as long as it is needed."""
_SECRET = "/.hidden"
"""A file without rights, shown in place of hidden ones."""
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
_SHARED_MEMORY = "/dev/shm"
_SHARED_MEMORY_SIZE = "mode=1777,size=64m"
"""Docker's default size; it counts as memory of nobody."""


class Access(StrEnum):
    """What a program may do with a folder or file, and all below."""

    READ = "read"
    WRITE = "write"
    HIDE = "hide"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One mount."""

    path: str
    """Where, inside and outside the same."""
    source: str
    """What is shown there; outside."""
    access: Access
    above: Access | None
    """Of the place that this one lies in."""

    def shows(self, path: str) -> str | None:
        """What is at a path in it, by its name outside; None: nothing."""
        return None if self.access is Access.HIDE else self.source + path[len(self.path) :]


def plan(*, readable: Iterable[str], writable: Mapping[str, str], hidden: Iterable[str]) -> Sequence[Place]:
    """The mounts, in their order. All paths are absolute and free of links. `writable`: place to what is shown there.

    What lies in a readable folder needs no mount to be read, and what is nowhere shown none to be hidden:

    >>> [place.path for place in plan(readable=["/a", "/a/b"], writable={"/a/w": "/a/w"}, hidden=["/a/h", "/z"])]
    ['/a', '/a/h', '/a/w']
    """
    wanted = dict.fromkeys(readable, Access.READ) | dict.fromkeys(hidden, Access.HIDE)
    wanted |= dict.fromkeys(writable, Access.WRITE)
    kept: dict[str, Place] = {}
    for path in sorted(wanted):
        access, above = wanted[path], _nearest(path, kept)
        source = writable.get(path, path)
        is_shown = above is not None and above.shows(path) == source
        if access is Access.HIDE and not is_shown:
            continue
        if is_shown and access in (Access.READ, above.access if above else None):
            continue
        kept[path] = Place(path=path, source=source, access=access, above=above.access if above else None)
    return list(kept.values())


def build(places: Sequence[Place], *, links: Mapping[str, str], files: Mapping[str, str], terminals: bool) -> None:
    """Make it the root of this process, which has mounts of its own; /proc stays writable for now. `links`: path to
    target; `files`: path to content. Raises OSError."""
    mount("tmpfs", _BASE, "mode=0755")
    os.mkdir(_BASE + _OUTSIDE)
    pivot(_BASE, _OUTSIDE)
    os.close(os.open(_SECRET, os.O_CREAT | os.O_WRONLY, 0))
    os.makedirs(_SHARED_MEMORY)
    mount("tmpfs", _SHARED_MEMORY, _SHARED_MEMORY_SIZE)  # first: places may lie in it
    for place in places:
        _show(place)
    for path, target in links.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    for path, text in files.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    _make_devices(terminals=terminals)
    os.mkdir("/proc")
    mount("proc", "/proc")  # while another one is in sight, or only root may
    os.unlink(_SECRET)
    unmount(_OUTSIDE)
    os.rmdir(_OUTSIDE)
    protect("/", below=True)
    for path in ["/proc", _SHARED_MEMORY, *(place.path for place in places if place.access is Access.WRITE)]:
        protect(path, read_only=False)
    if terminals:
        mount_terminals()


def resolve(path: str) -> tuple[str, Mapping[str, str]]:
    """A path without links, and the links on its way with their targets."""
    real = os.path.realpath(path)
    if real == path:
        return real, {}
    links: dict[str, str] = {}
    done, waiting = "/", [part for part in reversed(path.split("/")) if part]
    while waiting:
        here = os.path.normpath(os.path.join(done, waiting.pop()))
        if here not in links and os.path.islink(here):
            links[here] = os.readlink(here)
            waiting += [part for part in reversed(links[here].split("/")) if part]
            here = "/" if links[here].startswith("/") else done
        done = here
    return real, links


def _nearest(path: str, kept: Mapping[str, Place]) -> Place | None:
    while path != "/":
        path = os.path.dirname(path)
        if path in kept:
            return kept[path]
    return None


def _show(place: Place) -> None:
    source = _OUTSIDE + place.source
    is_folder = stat.S_ISDIR(os.stat(source).st_mode)
    if place.above is not Access.READ:  # there it exists, and making it would change the machine's own folder
        if os.path.realpath(place.path) != place.path:
            raise OSError(errno.ELOOP, f"{place.path}: a link leads elsewhere in the sandbox")
        os.makedirs(place.path if is_folder else os.path.dirname(place.path), exist_ok=True)
        if not is_folder:
            os.close(os.open(place.path, os.O_CREAT | os.O_WRONLY, 0o644))
    if place.access is not Access.HIDE:
        bind(source, place.path)
    elif is_folder:
        mount("tmpfs", place.path, "mode=0111")
    else:
        bind(_SECRET, place.path)


def _make_devices(*, terminals: bool) -> None:
    if terminals:
        os.makedirs("/dev/pts")
    for name in _DEVICES:
        os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o644))
        bind(f"{_OUTSIDE}/dev/{name}", f"/dev/{name}")
    for name, target in _LINKS.items():
        os.symlink(target, f"/dev/{name}")
