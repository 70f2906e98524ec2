"""Mounting, and changes to the view of a program that keeps the file system of this machine.

Such a program, which has no root of its own (`root`), may need terminals or folders at a fixed place: the user's
terminals lie in /dev/pts beside those that a program opens, and Landlock can only allow all of them; and some programs
insist on a folder of /tmp, which all rollouts would share. Root needs no more than a mount namespace; others need a
user namespace, too. https://docs.kernel.org/filesystems/devpts.html
"""

import errno
import os
import signal
import struct
from collections.abc import Mapping

from manege.sandbox.namespaces import CLONE_NEWNS, CLONE_NEWUSER, map_ids
from manege.sandbox.syscalls import PR_SET_PDEATHSIG, prctl, syscall

__all__ = [
    "TERMINALS",
    "bind",
    "change_view",
    "keep_mounts_private",
    "leave_mounts",
    "mount",
    "mount_terminals",
    "pivot",
    "protect",
    "unmount",
]

TERMINALS = ("/dev/ptmx", "/dev/pts")
"""What a program with terminals uses."""

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 4096, 16384, 1 << 19
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY, _NO_SETUID = 1, 2


def mount(kind: str, target: str, options: str = "") -> None:
    """A new file system, without devices and set-uid programs. Raises OSError."""
    flags = _MS_NOSUID | _MS_NODEV
    syscall("mount", kind.encode(), target.encode(), kind.encode(), flags, options.encode())


def bind(source: str, target: str) -> None:
    """Show a folder, with all that is mounted in it, or a file at another place. Raises OSError."""
    syscall("mount", source.encode(), target.encode(), b"", _MS_BIND | _MS_REC, b"")


def protect(target: str, *, read_only: bool = True, below: bool = False) -> None:
    """Make a mount read-only, or not any more; `below`: and those in it. Set-uid programs get no power. OSError."""
    read, write = (_READ_ONLY, 0) if read_only else (0, _READ_ONLY)
    attributes = struct.pack("=4Q", read | _NO_SETUID, write, 0, 0)
    syscall("mount_setattr", _AT_FDCWD, target.encode(), _AT_RECURSIVE if below else 0, attributes, len(attributes))


def pivot(root: str, old: str) -> None:
    """Make the mount `root` the root, and show the old one in its folder `old`. Raises OSError."""
    syscall("pivot_root", root.encode(), f"{root}/{old}".encode())
    os.chdir("/")


def unmount(target: str) -> None:
    """It goes when nobody uses it any more. Raises OSError."""
    syscall("umount2", target.encode(), _MNT_DETACH)


def mount_terminals() -> None:
    """A /dev/pts without anybody else's terminals. Raises OSError."""
    options = b"newinstance,ptmxmode=0666,mode=0620"
    syscall("mount", b"devpts", b"/dev/pts", b"devpts", _MS_NOSUID, options)


def change_view(*, terminals: bool, folders: Mapping[str, str]) -> None:
    """For this process and what it starts. `folders`: fixed place to private folder; the place is made where it does
    not exist. Raises OSError where mounting is not allowed."""
    try:
        leave_mounts()
        if terminals:
            mount_terminals()
            bind("/dev/pts/ptmx", "/dev/ptmx")
        for place, folder in folders.items():
            os.makedirs(place, mode=0o700, exist_ok=True)
            bind(folder, place)
    except OSError as error:
        raise OSError(
            error.errno, f"the harness needs a mount namespace, which this machine does not allow: {error.strerror}"
        ) from error


def leave_mounts() -> None:
    """Give this process a mount namespace: what it mounts, nobody else sees. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        syscall("unshare", CLONE_NEWNS)
    else:
        supervisor = os.getppid()
        syscall("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # which a new user namespace takes away
        if os.getppid() != supervisor:
            raise OSError(errno.ESRCH, "the supervisor has died")
        map_ids(os.getpid(), inside=uid, uid=uid, gid=gid)
    keep_mounts_private()


def keep_mounts_private() -> None:
    """In a new mount namespace: nothing that is mounted here shows outside. Raises OSError."""
    syscall("mount", b"none", b"/", b"", _MS_REC | _MS_SLAVE, b"")
