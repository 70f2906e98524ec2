"""Control groups: limits on memory, processes and CPU time of an attempt's whole process tree.

A supervisor makes a group before it forks, the child enters it before anything else, and it is removed when all is
dead. Groups lie below the one that we run in (v1: in each hierarchy) or, since v2 wants no groups below one that has
processes, in the nearest above that lets us make some: for root, and for a user to whom one is delegated
(`systemd-run --user --scope`, or a unit with `Delegate=` and `DelegateSubgroup=`). A supervisor holds a lock on its
group, so that what a killed one has left is known, killed and removed when the next warm parent starts.

More memory than allowed ends a process of the group, the biggest; more processes than allowed cannot be started.
https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

import contextlib
import errno
import fcntl
import functools
import os
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from manege.sandbox.spec import Limits
from manege.sandbox.syscalls import is_linux

__all__ = ["Group", "find", "limited", "others", "remove_leftovers"]

_PREFIX = "manege-"
_CONTROLLERS = ("memory", "pids", "cpu")
_TASKS_PER_PROCESS = 4
"""The kernel counts threads, users count processes."""
_PERIOD_US = 100_000
"""Over which CPU time is counted; the kernel's default."""
_PATIENCE_S = 1.0
"""For the kernel, to be done with processes that are dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The control group of one process tree."""

    folders: Sequence[str]
    """One, or one in each hierarchy of v1; that of memory is the first."""

    def enter(self) -> None:
        """Put this process, which has one thread, and what it will start under the limits. Raises OSError."""
        for folder in self.folders:
            # A thread moves at once; for a process the kernel waits until no processor looks at its old group, which
            # takes tens of milliseconds on a busy machine. v2 has only the latter.
            tasks = f"{folder}/tasks"
            _write(tasks if os.path.exists(tasks) else f"{folder}/cgroup.procs", "0")

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of it for want of memory. Raises OSError."""
        events = f"{self.folders[0]}/memory.events"
        text = _read(events if os.path.exists(events) else f"{self.folders[0]}/memory.oom_control")
        return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in text.splitlines())


def find() -> Literal["v1", "v2"] | None:
    """Which kind this user can make here, found out by making one and entering it."""
    try:
        with limited(Limits(memory_bytes=64 << 20, num_processes=64)) as group:
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(OSError):
                    group.enter()
                    os._exit(0)
                os._exit(1)
            if os.waitpid(pid, 0)[1] != 0:
                return None
    except OSError:
        return None
    return "v2" if _is_v2() else "v1"


@contextlib.contextmanager
def limited(limits: Limits) -> Iterator[Group]:
    """A new group with these limits; it is removed at the end, when its processes are dead. Raises OSError."""
    places = _places()
    if not places:
        raise OSError(errno.EACCES, "no control group can be made here, and none is delegated to this user")
    name = f"{_PREFIX}{uuid.uuid4().hex}"
    folders = {controller: f"{place}/{name}" for controller, place in places.items()}
    with contextlib.ExitStack() as stack:
        for folder in dict.fromkeys(folders.values()):
            stack.callback(os.close, _make_locked(folder))
            stack.callback(_remove, folder)
        for controller, file, value in _settings(limits):
            path = f"{folders[controller]}/{file}"
            if "sw" not in file or os.path.exists(path):  # a kernel may not count swap
                _write(path, str(value))
        yield Group(folders=list(dict.fromkeys(folders.values())))


def others(limits: Limits) -> Limits:
    """What a group does not limit."""
    return replace(limits, memory_bytes=None, resident_bytes=None, num_processes=None, cpus=None)


def remove_leftovers() -> None:
    """Kill and remove groups whose supervisor was killed."""
    for place in set(_places().values()):
        for name in os.listdir(place):
            folder = f"{place}/{name}"
            with contextlib.suppress(OSError):  # locked, another user's, or gone meanwhile
                if name.startswith(_PREFIX):
                    lock = _lock(folder, fcntl.LOCK_NB)
                    _kill(folder)
                    _remove(folder)
                    os.close(lock)


def _settings(limits: Limits) -> Sequence[tuple[str, str, str | int]]:
    """Controller, file and value. Pages that a program has not touched, or that it shares, are not counted twice, so
    both limits on memory mean the same here."""
    memory_bytes = limits.resident_bytes if limits.memory_bytes is None else limits.memory_bytes
    found: list[tuple[str, str, str | int]] = []
    if memory_bytes is not None and _is_v2():
        found += [("memory", "memory.max", memory_bytes), ("memory", "memory.swap.max", 0)]
    elif memory_bytes is not None:
        found += [("memory", f"memory.{kind}limit_in_bytes", memory_bytes) for kind in ("", "memsw.")]
    if limits.num_processes is not None:
        found.append(("pids", "pids.max", limits.num_processes * _TASKS_PER_PROCESS))
    if limits.cpus is not None:
        quota_us = max(1000, int(limits.cpus * _PERIOD_US))  # the kernel's least
        found.append(
            ("cpu", "cpu.max", f"{quota_us} {_PERIOD_US}") if _is_v2() else ("cpu", "cpu.cfs_quota_us", quota_us)
        )
    return found


def _is_v2() -> bool:
    return len(set(_places().values())) == 1


@functools.cache
def _places() -> Mapping[str, str]:
    """Controller to the folder that groups can be made in; the same one for all with v2. Empty: nowhere."""
    own: dict[str, str] = {}
    for line in _read("/proc/self/cgroup").splitlines() if is_linux() else ():
        _, controllers, path = line.split(":", 2)  # v2: no controllers
        own |= dict.fromkeys(controllers.split(","), path)
    folders: dict[str, str] = {}
    for line in _read("/proc/self/mountinfo").splitlines() if own else ():
        mount, _, system = line.partition(" - ")
        root, top = mount.split()[3:5]
        kind, _, options = system.split(" ", 2)
        for name in options.split(",") if kind == "cgroup" else [""] if kind == "cgroup2" else ():
            if name in own:
                folders.setdefault(name, os.path.normpath(f"{top}/{os.path.relpath(own[name], root)}"))
    if all(controller in folders for controller in _CONTROLLERS):
        return {controller: folders[controller] for controller in _CONTROLLERS}
    place = _delegated(folders[""]) if "" in folders else None
    return dict.fromkeys(_CONTROLLERS, place) if place else {}


def _delegated(folder: str) -> str | None:
    """The nearest of this group of v2 and those above whose groups can be limited by this user."""
    while os.path.exists(f"{folder}/cgroup.subtree_control"):
        with contextlib.suppress(OSError):  # it has processes, or is not ours
            for controller in _CONTROLLERS:
                if controller not in _read(f"{folder}/cgroup.subtree_control").split():
                    _write(f"{folder}/cgroup.subtree_control", f"+{controller}")
            if os.access(folder, os.W_OK) and os.access(f"{folder}/cgroup.procs", os.W_OK):
                return folder
        folder = os.path.dirname(folder)
    return None


def _make_locked(folder: str) -> int:
    """The descriptor that locks it. Raises OSError."""
    while True:
        os.mkdir(folder)
        with contextlib.suppress(FileNotFoundError):  # a sweep came in between
            lock = _lock(folder, 0)
            if os.path.exists(folder):
                return lock
            os.close(lock)


def _lock(folder: str, flags: int) -> int:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(lock)
        raise
    return lock


def _kill(folder: str) -> None:
    """All processes of a group, as often as new ones come."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while (pids := _read(f"{folder}/cgroup.procs").split()) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.001)


def _remove(folder: str) -> None:
    """What cannot be removed, since a process of it is stuck in the kernel, is left for the next sweep."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while os.path.exists(folder) and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
            return
        time.sleep(0.001)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
