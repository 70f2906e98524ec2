"""Pseudo-terminals of a program's own, for harnesses whose shell runs in one.

The user's terminals lie in /dev/pts beside those that a program opens, and Landlock can only allow all of them. So the
program gets a mount namespace with another, empty /dev/pts (devpts, newinstance) in it; nothing else changes there.
Root needs no more; others need user namespaces. https://docs.kernel.org/filesystems/devpts.html
"""

import os

from manege.sandbox.syscalls import syscall

__all__ = ["DEVICES", "open_own"]

DEVICES = ("/dev/ptmx", "/dev/pts")
"""What the program may then use."""

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19


def open_own() -> None:
    """For this process and what it starts. Raises OSError where mounting is not allowed."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid == 0:
            syscall("unshare", _CLONE_NEWNS)
        else:
            syscall("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
            _write("setgroups", "deny")
            _write("uid_map", f"{uid} {uid} 1")
            _write("gid_map", f"{gid} {gid} 1")
        _mount("none", "/", "", _MS_REC | _MS_SLAVE)
        _mount("devpts", "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=0620")
        _mount("/dev/pts/ptmx", "/dev/ptmx", "", _MS_BIND)
    except OSError as error:
        raise OSError(
            error.errno, f"no terminals of its own for a harness that needs them: {error.strerror}"
        ) from error


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    syscall("mount", *(text.encode() for text in (source, target, kind)), flags, options.encode())


def _write(name: str, text: str) -> None:
    with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
        file.write(text)
