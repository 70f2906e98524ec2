"""Layers of isolation: which there are, and what agents can do without them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Isolation that can be had, or that was enforced on an attempt."""

    system: str
    """`sys.platform`."""
    landlock_abi: int
    """Version of the kernel's Landlock; 0: none."""
    seccomp: bool
    """System call filter."""
    namespaces: bool = False
    """User, PID, mount, IPC, network and UTS namespaces of its own, with a root of its own."""
    overlay: bool = False
    """Overlay mounts in such a namespace."""
    cgroup: Literal["v1", "v2"] | None = None
    """Limits on all processes of an attempt together; None: this user may make no groups."""
    uids: bool = False
    """A user id of its own for each attempt: only root can give them."""
    notify: bool = False
    """What an agent tries in vain is seen (seccomp user notification)."""
    bubblewrap: bool = False
    """`namespaces` come from bubblewrap, because this user may not make any."""

    @property
    def isolates(self) -> bool:
        """Whether an agent is kept from the user's files and from other processes."""
        return self.landlock_abi > 0 and self.seccomp

    def names(self) -> Sequence[str]:
        """For a rollout's record."""
        found = ["process tree", "clean environment", "limits"]
        found += [f"landlock {self.landlock_abi}"] if self.landlock_abi else []
        return found + (["seccomp"] if self.seccomp else [])

    def missing(self) -> Sequence[str]:
        """One line per layer that is not there, with its consequence."""
        if self.system != "linux":
            return [
                f"no isolation on {self.system}: agents can read and write your files, reach any host and leave "
                "processes behind; only their environment is clean"
            ]
        lines: list[str] = []
        if not self.landlock_abi:
            lines.append("no Landlock: agents can read and write your files and reach any host by TCP")
        elif self.landlock_abi < 3:
            lines.append(f"Landlock {self.landlock_abi} < 3: agents can empty files that they cannot open")
        if 0 < self.landlock_abi < 4:
            lines.append(f"Landlock {self.landlock_abi} < 4: agents can reach any host by TCP")
        if 0 < self.landlock_abi < 6:
            lines.append(f"Landlock {self.landlock_abi} < 6: agents can signal your other processes")
        if not self.seccomp:
            lines.append("no seccomp: agents can use UDP, Unix sockets and ptrace, and read the memory of others")
        lines.append("no network namespace: agents can reach any host on the gateway's port")
        return lines
