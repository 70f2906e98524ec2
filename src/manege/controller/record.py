"""What a scorer is given about an attempt. Light to import: it crosses into the scorer's process."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manege.types import Call

__all__ = ["AttemptRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """What an agent left behind; every process of it is dead."""

    workspace: Path
    """The folder that the agent worked in, as it left it."""
    stdout: str
    stderr: str
    exit_code: int | None
    """None: a signal or the end of its time stopped it."""
    timed_out: bool
    calls: Sequence[Call]
    """The transcript that the gateway recorded, which the agent cannot forge: request and reply of each model call."""
