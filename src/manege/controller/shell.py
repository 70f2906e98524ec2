"""A shell in the place of an agent: in its sandbox, its workspace and its environment, for a person to look around."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from manege.sandbox.spec import ProcessSpec

__all__ = ["in_terminal"]

_BECOME = (
    "import fcntl, os, sys, termios; os.dup2(1, 0); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "number = int(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2 : 2 + number])"
)
"""The output is a terminal: make it the input, too, and the one whose keys are signals, and become so many of the words
that follow."""
_PROMPT = "sandbox$ "


def in_terminal(spec: ProcessSpec, terminal: str) -> ProcessSpec:
    """The process of an agent with a shell in the agent's place. `terminal`: path of a pseudo-terminal."""
    path = spec.env.get("PATH", os.defpath)
    bash = shutil.which("bash", path=path)
    shell = [bash, "--norc"] if bash else ["/bin/sh"]
    # What the agent's command names may be read in the sandbox because it is part of the command.
    agent = [] if isinstance(spec.program, str) else list(spec.program)
    for output in (spec.stdout, spec.stderr):
        Path(output).touch(mode=0o600)
    return replace(
        spec,
        program=[sys.executable, "-I", "-S", "-c", _BECOME, str(len(shell)), *shell, *agent],
        env={**spec.env, "TERM": os.environ.get("TERM", "dumb"), "PS1": _PROMPT},
        stdout=terminal,
        stderr=terminal,
    )
