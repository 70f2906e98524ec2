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

    @property
    def confines(self) -> bool:
        """Whether it is also kept from every network, and has a file system and processes of its own."""
        return self.isolates and self.apart

    @property
    def apart(self) -> bool:
        """Whether it has namespaces, by whichever means."""
        return self.namespaces or self.bubblewrap

    def names(self) -> Sequence[str]:
        """For a rollout's record."""
        named = {
            f"landlock {self.landlock_abi}": self.landlock_abi > 0,
            "seccomp": self.seccomp,
            "namespaces": self.namespaces,
            "bubblewrap": self.bubblewrap,
            f"cgroup {self.cgroup}": self.cgroup is not None,
            "user id": self.uids,
            "notification": self.notify,
        }
        return ["process tree", "clean environment", "limits", *(name for name, is_there in named.items() if is_there)]

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
        if 0 < self.landlock_abi < 4 and not self.apart:
            lines.append(f"Landlock {self.landlock_abi} < 4: agents can reach any host by TCP")
        if 0 < self.landlock_abi < 6 and not self.apart:
            lines.append(f"Landlock {self.landlock_abi} < 6: agents can signal your other processes")
        if not self.seccomp:
            lines.append("no seccomp: agents can use UDP, Unix sockets and ptrace, and read the memory of others")
        if not self.apart:
            lines.append(
                "no namespaces: agents run as you, can reach any host on the gateway's port and see which files and "
                "processes there are"
            )
        if self.cgroup is None:
            lines.append(
                "no cgroup: agents can use all processors, and more memory or processes than allowed for a moment"
            )
        if not self.notify:
            lines.append("no seccomp notification: agents can try what is forbidden without being seen")
        return lines
