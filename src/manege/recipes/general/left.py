"""What an agent left behind, read as what it is: the work of a stranger.

A file counts only if it is a regular one of a bounded size (no link, no pipe). A program that the agent wrote runs
apart from the scorer, with a time limit, isolated from the workspace's modules, and its output is bounded too.
"""

import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ANSWER", "Left"]

ANSWER = "answer.txt"
_MAX_BYTES = 1 << 20
_PROGRAM_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """By one attempt."""

    workspace: Path
    stdout: str

    def answer(self) -> str:
        """All of answer.txt; without it, the last line that the agent printed."""
        if (self.workspace / ANSWER).exists():
            return self.text(ANSWER).strip()
        lines = self.stdout.strip().splitlines()
        return lines[-1].strip() if lines else ""

    def text(self, name: str) -> str:
        """Of a file of the workspace; empty without one."""
        try:
            descriptor = os.open(self.workspace / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return ""
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return ""
            data = file.read(_MAX_BYTES + 1)
        return data.decode("utf-8", "replace") if len(data) <= _MAX_BYTES else ""

    def lines(self, name: str) -> list[str]:
        """Of a file, without blank ones and without space at their ends."""
        return [line.strip() for line in self.text(name).splitlines() if line.strip()]

    def run(self, name: str, stdin: str) -> str:
        """What the Python program `name` prints; empty if it fails."""
        source = self.text(name)
        if not source:
            return ""
        with tempfile.TemporaryDirectory() as folder:
            script, output = Path(folder, "program.py"), Path(folder, "output")
            script.write_text(source, encoding="utf-8")
            with output.open("wb") as sink:
                try:
                    done = subprocess.run(
                        [sys.executable, "-I", "-S", str(script)],
                        input=stdin.encode(),
                        stdout=sink,
                        stderr=subprocess.DEVNULL,
                        cwd=folder,
                        timeout=_PROGRAM_S,
                    )
                except subprocess.TimeoutExpired:
                    return ""
            if done.returncode != 0 or output.stat().st_size > _MAX_BYTES:
                return ""
            return output.read_text(encoding="utf-8", errors="replace").strip()
