"""A rank in a process of its own, as rank 0 sees it: started, asked, waited for, ended.

Questions and answers are pickles over a pipe that nobody else has: `(name, arguments)` there, a value or the error that
it raised back. One question is under way at a time. The process dies with this one.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from manege.errors import TrainerError
from manege.trainer.engines.rank_group import RankLostError

__all__ = ["RankProcess", "first_end"]

_DYING_S = 2.0
"""Between the end of a process's pipe and its exit code."""


class RankProcess:
    """One rank but rank 0."""

    def __init__(self, rank: int, module: str, *, timeout_s: float) -> None:
        """Run `python -m MODULE FD PARENT`, where FD is its end of the pipe. An answer takes `timeout_s` at most."""
        self.rank = rank
        self._timeout_s = timeout_s
        self._reason: str | None = None
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for rank 0, which ends the others
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def end(self) -> str | None:
        """What the process died of; None: it lives."""
        code = self._process.poll()
        if code is None:
            return None
        return self._reason or f"rank {self.rank} ended with exit code {code}"

    def ask(self, name: str, *arguments: Any) -> None:
        """Do not wait for the answer. Raises RankLostError."""
        try:
            self._pipe.send((name, arguments))
        except OSError as error:
            raise self._lost() from error

    def answer(self, timeout_s: float | None = None) -> Any:
        """To the last question; may be a ManegeError. Raises RankLostError, and ends a process that gives none in
        time."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            if not self._pipe.poll(timeout_s):
                self.kill(f"rank {self.rank} hangs: it gave no answer within {timeout_s:g} s (backend.timeout_s)")
            return self._pipe.recv()
        except (OSError, EOFError) as error:
            raise self._lost() from error

    def kill(self, reason: str | None = None) -> None:
        """End the process and wait for its end. Safe to repeat; the first reason counts."""
        if self._process.poll() is None:
            self._reason = self._reason or reason
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Safe to repeat."""
        self.kill()
        self._pipe.close()

    def _lost(self) -> RankLostError:
        try:
            self._process.wait(_DYING_S)
        except subprocess.TimeoutExpired:
            self.kill(f"rank {self.rank} closed its pipe and went on")
        return RankLostError(self.end)


def first_end(processes: Sequence[RankProcess]) -> TrainerError | None:
    """The error of a rank that has died; None: all of them live."""
    for process in processes:
        if (end := process.end) is not None:
            return TrainerError(f"{end}; go on from the last checkpoint with --resume")
    return None
