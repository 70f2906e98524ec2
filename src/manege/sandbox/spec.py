"""What the controller asks of a warm parent, and what comes back: plain data that crosses processes.

A request (ProcessSpec) travels as a pickle from the controller to the supervisor, never the other way; an Exit travels
back as JSON, since nothing that an agent's process could write may be unpickled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manege.sandbox.policy import Policy

__all__ = ["LISTENER", "Exit", "Limits", "Overlay", "ProcessSpec", "Program", "Seen"]

LISTENER = b"L"
"""Comes on the lifeline with the socket that listens inside, ahead of the Exit."""

Program = str | Sequence[str]
"""`module:function`, called in a fork of a warm parent, or a command as a list of arguments."""

REPLY = 3
"""The descriptor of a command that answers; what it starts has it only if it passes it on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """A folder that is seen in place of another, by this process tree alone: changes go to `upper`."""

    place: str
    """Where it is seen; exists."""
    lower: Sequence[str]
    """Folders that are never written, the topmost first."""
    upper: str
    """Takes what is written; on one file system with `work`."""
    work: str
    """Empty, for the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Something that a process tree tried and that an honest one has no need of."""

    kind: str
    """`file`, `network`, `git` or `packages`."""
    detail: str
    """A path, an address or a command line, cut to 200 characters."""
    count: int
    """How often."""
    flags: bool
    """Whether it is an attempt to cheat, as far as can be told (docs/concepts/sandbox.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes and counts. None: unlimited, for programs of the user's own (setup, scorer)."""

    memory_bytes: int | None = None
    """Address space of a process."""
    resident_bytes: int | None = None
    """Memory in use by all descendants together, for programs that reserve address space without end; looked at now
    and then, so a limit on what grows, not on a leap."""
    file_bytes: int | None = None
    """Size of a file."""
    num_files: int | None = None
    """Open files of a process."""
    num_processes: int | None = None
    """Descendants at once; more end the attempt."""
    cpus: float | None = None
    """Cores' worth of time, of all descendants together."""
    output_bytes: int = 16 << 20
    """stdout and stderr that are kept, each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process tree to start."""

    program: Program
    role: str
    """`agent`, `setup` or `scorer`: each role has its own warm parents; also the name in messages."""
    env: Mapping[str, str]
    """The whole environment; nothing is inherited."""
    cwd: str
    stdout: str
    """File to write; created or emptied."""
    stderr: str
    """The same; may be the same file as stdout."""
    limits: Limits
    policy: Policy | None
    """None: a program of the user's own, not sandboxed but in its own process tree."""
    overlay: Overlay | None = None
    """Mounted before anything else is done, with `policy` or without."""
    stdin: bytes = b""
    """For a command."""
    args: Sequence[Any] = ()
    """For a function; picklable."""
    replies: bool = False
    """Whether an answer is wanted back: what a function returns, as JSON; what a command writes to `REPLY`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process tree ended; every process of it is dead."""

    code: int | None
    """Exit code; None: a signal ended the program, or we did."""
    signal: int | None
    """The signal that ended the program; None after a normal exit."""
    limit: str | None = None
    """`memory`, `file size` or `processes` if a limit ended it."""
    timed_out: bool = False
    """Whether its time was used up; it was then killed by us."""
    cpu_seconds: float
    """Of the whole tree."""
    num_left: int
    """Processes that were still there when the program ended, and were killed."""
    reply: str | None = None
    """What the function returned, as JSON text; a value that JSON lacks as its repr. Of a command, what it wrote. None:
    nothing."""
    error: str | None = None
    """Why the program could not be started; None: it was."""
    seen: Sequence[Seen] = ()
    """What it tried in vain: what flags first, then what it tried most often."""

    @property
    def how(self) -> str:
        """For messages."""
        return f"exit code {self.code}" if self.signal is None else f"signal {self.signal}"
