"""A view of the file system of a program's own, where a harness needs one: terminals, folders at a fixed place.

The user's terminals lie in /dev/pts beside those that a program opens, and Landlock can only allow all of them; and
some programs insist on a folder of /tmp, which all rollouts would share. So the program gets a mount namespace with an
empty /dev/pts of its own (devpts, newinstance), or with private folders over the fixed ones; nothing else changes in
it. Root needs no more; others need user namespaces. https://docs.kernel.org/filesystems/devpts.html
"""

import errno
import os
import signal
from collections.abc import Mapping

from manege.sandbox.syscalls import PR_SET_PDEATHSIG, prctl, syscall

__all__ = ["TERMINALS", "change_view"]

TERMINALS = ("/dev/ptmx", "/dev/pts")
"""What a program with terminals uses."""

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19


def change_view(*, terminals: bool, folders: Mapping[str, str]) -> None:
    """For this process and what it starts. `folders`: fixed place to private folder; the place is made where it does
    not exist. Raises OSError where mounting is not allowed."""
    try:
        _leave_namespace()
        _mount("none", "/", "", _MS_REC | _MS_SLAVE)
        if terminals:
            _mount("devpts", "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=0620")
            _mount("/dev/pts/ptmx", "/dev/ptmx", "", _MS_BIND)
        for place, folder in folders.items():
            os.makedirs(place, mode=0o700, exist_ok=True)
            _mount(folder, place, "", _MS_BIND)
    except OSError as error:
        raise OSError(
            error.errno, f"the harness needs a mount namespace, which this machine does not allow: {error.strerror}"
        ) from error


def _leave_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        syscall("unshare", _CLONE_NEWNS)
        return
    supervisor = os.getppid()
    syscall("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # which a new user namespace takes away
    if os.getppid() != supervisor:
        raise OSError(errno.ESRCH, "the supervisor has died")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    syscall("mount", *(text.encode() for text in (source, target, kind)), flags, options.encode())
