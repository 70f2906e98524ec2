"""Which processes descend from this one, and how to be rid of them all (Linux; elsewhere only a process group)."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

from manege.sandbox.syscalls import is_linux

__all__ = ["descendants", "kill_all", "reap", "resident_bytes"]


def reap(statuses: dict[int, int]) -> bool:
    """Add the wait status of each child that has died; whether there are children left.

    A subreaper without children has no descendants either: orphans become its children.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        statuses[pid] = status


def kill_all(leader: int) -> int:
    """Kill until no child is left; returns how many processes were killed beside `leader`.

    New forks may slip through a round, so it takes as many rounds as it takes.
    """
    killed: set[int] = set()
    while reap({}):
        found = descendants()
        killed.update(found)
        for pid in found:
            _signal(os.kill, pid)
        if not is_linux():
            _signal(os.killpg, leader)
        time.sleep(0.001)
    return len(killed - {leader})


def descendants() -> Sequence[int]:
    """All processes below this one. None are found without /proc."""
    # Not every kernel has these files; to read the parent of every process instead is slow on a busy machine.
    own = os.getpid()
    children_of = _listed_children if os.path.exists(f"/proc/{own}/task/{own}/children") else _scanned_children()
    found: list[int] = []
    waiting = [own]
    while waiting:
        children = children_of(waiting.pop())
        found += children
        waiting += children
    return found


def resident_bytes(pids: Iterable[int]) -> int:
    """Memory in use; what processes share counts for each of them."""
    pages = 0
    for pid in pids:
        try:
            pages += int(_read(f"/proc/{pid}/statm").split()[1])
        except (OSError, IndexError):  # it has just ended
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


def _listed_children(pid: int) -> Sequence[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [int(word) for thread in threads for word in _read(f"/proc/{pid}/task/{thread}/children").split()]
    except OSError:  # it has just ended
        return []


def _scanned_children() -> Callable[[int], Sequence[int]]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if is_linux() else []:
        if name.isdigit():
            try:
                # `pid (any name) state parent ...`
                parent = int(_read(f"/proc/{name}/stat").rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    return lambda pid: children.get(pid, [])


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _signal(send: Callable[[int, int], None], pid: int) -> None:
    try:
        send(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
