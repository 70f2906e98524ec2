"""Verbs of manege in processes of their own, and what is below them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).parent / "programs"
_COMMAND = [sys.executable, "-c", "import sys; from manege.cli import main; sys.exit(main())"]
_PATHS = [str(PROGRAMS), os.environ.get("PYTHONPATH", "")]
_ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, _PATHS)), "COLUMNS": "200"}


def until(condition, what, timeout_s=45, every_s=0.01):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(every_s)
    return found


class Part:
    """One verb: started, killed, frozen, started again. Its output goes to a file."""

    def __init__(self, words, log, *, ready):
        """`ready`: what it prints when it serves."""
        self._words, self.log, self._ready = [str(word) for word in words], log, ready
        self._process, self._begin = None, 0

    def start(self, *more):
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as file:
            self._process = subprocess.Popen(
                [*_COMMAND, *self._words, *more], cwd=ROOT, stdout=file, stderr=file, env=_ENV
            )

    def wait_until_ready(self):
        until(lambda: self.is_alive() and re.search(self._ready, self.log.read_text()[self._begin :]), self._ready)

    @property
    def pid(self):
        return self._process.pid

    def is_alive(self):
        assert self._process.poll() is None, self.log.read_text()
        return True

    @property
    def code(self):
        """Its exit code; None: it runs."""
        return self._process.poll()

    def has_ended(self):
        return self._process.poll() is not None

    def send(self, number):
        self._process.send_signal(number)

    def kill(self, number):
        """Also if it is frozen; returns when it is gone."""
        self.send(number)
        self.send(signal.SIGCONT)
        code = self._process.wait(20)
        assert code == (-number if number == signal.SIGKILL else 128 + number), self.log.read_text()

    def end(self):
        """However the test went."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def children():
    """All processes by their parent: parent -> [(pid, start time)]."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            # `pid (any name) state parent ... start time`, the 22nd field
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found.setdefault(int(fields[1]), []).append((int(name), int(fields[19])))
    return found


def below(pids):
    """(pid, start time) of everything that descends from these."""
    known, found, waiting = children(), set(), list(pids)
    while waiting:
        for child in known.get(waiting.pop(), ()):
            found.add(child)
            waiting.append(child[0])
    return found


def working_in(folder):
    """Processes by their working folder, of those that lies in `folder`."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            path = Path(os.readlink(f"/proc/{name}/cwd"))
        except OSError:
            continue
        if folder in path.parents:
            found.setdefault(path, []).append(int(name))
    return found


def number_inside(pid):
    """The number that a process has for itself; None: it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return next(int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:"))
