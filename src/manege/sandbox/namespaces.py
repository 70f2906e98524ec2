"""Namespaces: a process tree with its own processes, mounts, network, host name, IPC and users.

`fork_apart` forks into all of them but the last; root needs no more for it, others do it as root of a user namespace
that maps only themselves. `unshare_users` then gives the program a user namespace of its own below, in which it is an
ordinary user, so that it has no power over the other namespaces whatever becomes of it.
https://man7.org/linux/man-pages/man7/user_namespaces.7.html
"""

import fcntl
import os
import signal
import socket
import struct

from manege.sandbox.syscalls import PR_SET_DUMPABLE, prctl, syscall

__all__ = [
    "CLONE_NEWNS",
    "CLONE_NEWUSER",
    "INSIDE_ID",
    "bring_up_loopback",
    "fork_apart",
    "listen",
    "map_ids",
    "unshare_users",
]

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
_CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWPID, _CLONE_NEWNET = 0x04000000, 0x08000000, 0x20000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40
_BACKLOG = 128
"""Connections that may wait while nobody accepts, as when the gateway restarts."""

INSIDE_ID = 1000
"""User and group inside, whoever we are outside: no program takes itself for root."""


def fork_apart(*, network: bool) -> int:
    """As os.fork, with the child as the first process of new namespaces; `network`: of a network, too. The child does
    nothing of Python's bookkeeping, so what it forks may run any program, but itself should not. Raises OSError."""
    flags = CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | signal.SIGCHLD
    flags |= _CLONE_NEWNET if network else 0
    try:
        return _clone(flags)
    except PermissionError:
        pass
    uid, gid = os.getuid(), os.getgid()
    mapped, tell_mapped = os.pipe()
    pid = _clone(flags | CLONE_NEWUSER)
    if pid == 0:
        os.close(tell_mapped)
        if not os.read(mapped, 1):
            os._exit(1)
        os.close(mapped)
        return 0
    try:
        map_ids(pid, inside=0, uid=uid, gid=gid)
        os.write(tell_mapped, b"m")
    finally:
        os.close(mapped)
        os.close(tell_mapped)
    return pid


def map_ids(pid: int, *, inside: int, uid: int, gid: int) -> None:
    """Make `inside` the only user and group of a process's user namespace; in ours it is `uid` and `gid`. OSError."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        with open(f"/proc/{pid}/{name}", "wb", buffering=0) as file:  # bytes: an encoding may be a module to import
            file.write(text.encode())


def unshare_users(channel: socket.socket) -> None:
    """Go to a user namespace of this process's own and become its only user, when the one at the other end of
    `channel`, told by a byte, has mapped it and answered. Raises OSError."""
    syscall("unshare", CLONE_NEWUSER)
    channel.sendall(b"u")
    if not channel.recv(1):
        raise OSError("the init of the namespaces has ended")
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    prctl(PR_SET_DUMPABLE, 1)  # or its own /proc/self would be closed to it


def bring_up_loopback() -> None:
    """127.0.0.1 and ::1 of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP | _IFF_RUNNING))


def listen(port: int) -> socket.socket:
    """A listening socket of this network namespace, which works wherever it is handed to."""
    return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)


def _clone(flags: int) -> int:
    return syscall("clone", flags, 0, 0, 0, 0)
