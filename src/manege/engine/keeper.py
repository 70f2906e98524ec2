"""Keeps one server that the run started: when the run is gone, whatever ended it, the server and all its processes go.

Run as a file, by any Python, with the server's command line as arguments: `python -I -S keeper.py COMMAND...`. Its
standard input is the lifeline: whoever started it holds the other end, and its closing, by a `kill -9` too, is the
order to stop. The server has a process group of its own, which gets SIGTERM, and SIGKILL after GRACE_S; orphans of it
become children of the keeper, so that none is overlooked. The exit code is the server's, 128 + n for signal n.

Imports nothing of manege: it must start at once.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

GRACE_S = 10.0
"""From SIGTERM to SIGKILL."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: list[str]) -> int:
    """Start the server, wait for its end or for the order, leave no process."""
    libc = ctypes.CDLL(None)
    # Linux only; elsewhere the process group is what is known of the server.
    prctl = getattr(libc, "prctl", lambda *_: 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # The keeper has one thread, so that running code between fork and exec is safe.
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    ended = os.pidfd_open(server.pid)
    select.select([sys.stdin, ended], [], [])
    _signal(server.pid, signal.SIGTERM)
    select.select([ended], [], [], GRACE_S)
    while True:
        _signal(server.pid, signal.SIGKILL)
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if pid == server.pid:
            server.returncode = os.waitstatus_to_exitcode(status)
    code = server.returncode or 0
    return 128 - code if code < 0 else code


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def _children() -> list[int]:
    """Ours, orphans of the server included."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
