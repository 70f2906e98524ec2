"""The process between us and one attempt: it starts the program, watches it, and leaves nothing alive.

In: a request and a lifeline, the socket whose other end only the controller holds. Out: one Exit as JSON on it. The end
of the lifeline is the order to kill, so a controller that is killed takes its agents along. The supervisor is the
subreaper of all descendants, so double forks and new sessions do not escape: it returns only when it has no child left.
Single-threaded; ignores polite signals, and the agent's filter does not let it be killed from inside.
"""

import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from manege.sandbox.processes import descendants, kill_all, reap, resident_bytes
from manege.sandbox.spec import Exit, Limits
from manege.sandbox.syscalls import PR_SET_CHILD_SUBREAPER, is_linux, prctl
from manege.sandbox.watch import Watcher

__all__ = ["report", "supervise"]

_TICK_MS = 200
"""Between looks at what no system call limits: number of processes, memory in use, size of the output."""

_KILLED = Exit(code=None, signal=signal.SIGKILL, cpu_seconds=0, num_left=0)
"""An end by our hand, before the figures are known."""


def supervise(
    start: Callable[[int], None],
    lifeline: socket.socket,
    outputs: Sequence[int],
    limits: Limits,
    *,
    fork: Callable[[], int] = os.fork,
    watcher: Watcher | None = None,
) -> Exit:
    """Fork, run `start(pipe)` in the child, and wait for its end, the controller's order or a limit.

    `start` does not return; it may `report` to the pipe why the program cannot be started, and, where the child only
    starts the program, how that ended. `fork`: os.fork, or another into new namespaces; `watcher`: if the program's
    process hands over to it. Raises OSError.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if is_linux():
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup = _wake_on_child_death()
    pipe, child_pipe = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(pipe)
        start(child_pipe)
    os.close(child_pipe)
    ended = _watch(pid, lifeline, wakeup, outputs, limits, watcher)
    num_left = kill_all(pid)
    reported = _reported(pipe)
    if ended.code == 0 and "status" in reported:
        ended, num_left = _exit_of(reported["status"]), reported["num_left"]
    for output in outputs:
        _cut(output, limits.output_bytes)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    seen = watcher.seen() if watcher else ()
    return replace(ended, cpu_seconds=cpu_seconds, num_left=num_left, error=reported.get("error"), seen=seen)


def report(pipe: int, **facts: int | str) -> None:
    """Tell the supervisor: `error`, or `status` and `num_left`."""
    os.write(pipe, json.dumps(facts).encode() + b"\n")


def _reported(pipe: int) -> dict[str, Any]:
    """All of it; those who could write are dead."""
    with os.fdopen(pipe, encoding="utf-8") as file:
        return {name: value for line in file for name, value in json.loads(line).items()}


def _wake_on_child_death() -> int:
    """A descriptor that is readable after SIGCHLD."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return readable


def _watch(
    pid: int,
    lifeline: socket.socket,
    wakeup: int,
    outputs: Sequence[int],
    limits: Limits,
    watcher: Watcher | None,
) -> Exit:
    """Until the program ends, a limit is passed, or the lifeline says stop."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    if watcher is not None:
        watcher.begin(poll)
    look_s = 0.0
    while True:
        events = poll.poll(_TICK_MS)
        ready = [descriptor for descriptor, _ in events]
        if watcher is not None:
            for descriptor, event in events:
                watcher.serve(descriptor, event, poll)
        if wakeup in ready:
            os.read(wakeup, 1 << 12)
            statuses: dict[int, int] = {}
            reap(statuses)
            if pid in statuses:
                return _exit_of(statuses[pid])
        if lifeline.fileno() in ready:
            return _KILLED
        if time.monotonic() < look_s:
            continue
        look_s = time.monotonic() + _TICK_MS / 1000
        for output in outputs:
            _cut(output, limits.output_bytes)
        if limits.num_processes is not None and len(descendants()) > limits.num_processes:
            return replace(_KILLED, limit="processes")
        if limits.resident_bytes is not None and resident_bytes(descendants()) > limits.resident_bytes:
            return replace(_KILLED, limit="memory")


def _exit_of(status: int) -> Exit:
    """A SIGKILL that is not ours is the kernel's, out of memory; SIGXFSZ is a file that grew too big."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return replace(_KILLED, code=code, signal=None)
    limits: dict[int, str] = {signal.SIGKILL: "memory", signal.SIGXFSZ: "file size"}
    return replace(_KILLED, signal=-code, limit=limits.get(-code))


def _cut(output: int, limit_bytes: int) -> None:
    """The file is opened for appending, so that a program that goes on writing leaves no hole."""
    if os.fstat(output).st_size > limit_bytes:
        os.ftruncate(output, limit_bytes)
