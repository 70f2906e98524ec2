"""Landlock: this process and its descendants may open only what is listed, for good.

In: folders and files to read or write, TCP ports to connect to. Unprivileged, needs no_new_privs. What the kernel's
Landlock version (ABI) cannot restrict stays open; `probe` says what that means.
https://docs.kernel.org/userspace-api/landlock.html

Three things it never restricts, so that seccomp must: TCP Fast Open and MPTCP (both connect past its TCP rules), and
sockets that are not TCP.
"""

import errno
import os
import stat
import struct
from collections.abc import Iterable

from manege.sandbox.syscalls import syscall

__all__ = ["landlock_abi", "restrict"]

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ = _EXECUTE | _READ_FILE | _READ_DIR

_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH, _RULE_NET_PORT = 1, 2
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_SOCKET, _SCOPE_SIGNAL = 1, 2


def landlock_abi() -> int:
    """The kernel's version of Landlock; 0: none, switched off, or forbidden by a container."""
    try:
        return syscall("landlock_create_ruleset", 0, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def restrict(
    *,
    abi: int,
    readable: Iterable[str],
    listable: Iterable[str],
    writable: Iterable[str],
    tcp_ports: Iterable[int] | None,
) -> None:
    """Restrict this process. Paths that do not exist are skipped; below `listable` only names can be read. From ABI 4
    on TCP connects only to `tcp_ports` and binds nowhere (None: TCP is not restricted); from ABI 6 on signals and
    abstract sockets stay within."""
    handled = (1 << 13) - 1
    handled |= (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0) | (_IOCTL_DEV if abi >= 5 else 0)
    fields = [handled]
    if abi >= 4:
        fields.append(0 if tcp_ports is None else _BIND_TCP | _CONNECT_TCP)
    if abi >= 6:
        fields.append(_SCOPE_ABSTRACT_SOCKET | _SCOPE_SIGNAL)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        for path in readable:
            _allow_path(ruleset, path, _READ)
        for path in listable:
            _allow_path(ruleset, path, _READ_DIR)
        for path in writable:
            _allow_path(ruleset, path, handled & ~(_MAKE_CHAR | _MAKE_BLOCK))
        if abi >= 4:
            for port in tcp_ports or ():
                syscall("landlock_add_rule", ruleset, _RULE_NET_PORT, struct.pack("=QQ", _CONNECT_TCP, port), 0)
        syscall("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _allow_path(ruleset: int, path: str, rights: int) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(target).st_mode):
            rights &= _FILE_RIGHTS
        syscall("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, target), 0)
    except OSError as error:
        if error.errno != errno.EBADFD:  # /dev/stdout that is a pipe, which is never restricted
            raise
    finally:
        os.close(target)
