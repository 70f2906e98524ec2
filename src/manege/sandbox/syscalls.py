"""Linux calls that Python's standard library lacks, through ctypes, for x86_64 and aarch64.

Everything raises OSError with the name of the call. Nothing here runs at import time except reading the machine's name;
on other systems `ARCH` is None and only `is_linux` may be relied on.
"""

import ctypes
import errno
import functools
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ARCH", "Arch", "drop_capabilities", "is_linux", "prctl", "syscall"]

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_CAPABILITY_VERSION_3 = 0x20080522


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """What differs between machines."""

    audit: int
    """AUDIT_ARCH_* of <linux/audit.h>: a seccomp filter must check it before it looks at a number."""
    numbers: Mapping[str, int]
    """System call numbers by name."""


# The same on every architecture since Linux 5.1.
_COMMON = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fspick": 433,
    "pidfd_open": 434,
    "clone3": 435,
    "openat2": 437,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}

# asm/unistd_64.h, asm-generic/unistd.h
# fmt: off
_ARCHS = {
    "x86_64": Arch(audit=0xC000003E, numbers=_COMMON | {
        "open": 2, "connect": 42, "execve": 59, "openat": 257, "execveat": 322,
        "socket": 41, "sendto": 44, "sendmsg": 46, "socketpair": 53, "clone": 56, "kill": 62, "ptrace": 101,
        "capset": 126, "rt_sigqueueinfo": 129, "pivot_root": 155, "mount": 165, "umount2": 166, "init_module": 175,
        "delete_module": 176, "tkill": 200, "tgkill": 234, "kexec_load": 246, "add_key": 248, "request_key": 249,
        "keyctl": 250, "unshare": 272, "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "open_by_handle_at": 304,
        "sendmmsg": 307, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313,
        "prlimit64": 302, "seccomp": 317, "bpf": 321, "userfaultfd": 323,
    }),
    "aarch64": Arch(audit=0xC00000B7, numbers=_COMMON | {
        "openat": 56, "connect": 203, "execve": 221, "execveat": 281,
        "umount2": 39, "mount": 40, "pivot_root": 41, "capset": 91, "unshare": 97, "kexec_load": 104,
        "init_module": 105, "delete_module": 106, "ptrace": 117, "kill": 129, "tkill": 130, "tgkill": 131,
        "rt_sigqueueinfo": 138, "socket": 198, "socketpair": 199, "sendto": 206, "sendmsg": 211, "add_key": 217,
        "request_key": 218, "keyctl": 219, "clone": 220, "rt_tgsigqueueinfo": 240, "perf_event_open": 241,
        "prlimit64": 261, "open_by_handle_at": 265, "setns": 268, "sendmmsg": 269, "process_vm_readv": 270,
        "process_vm_writev": 271, "finit_module": 273, "seccomp": 277, "bpf": 280, "userfaultfd": 282,
    }),
}
# fmt: on


def is_linux() -> bool:
    """Whether this is Linux (WSL counts)."""
    return sys.platform == "linux"


ARCH = _ARCHS.get(platform.machine()) if is_linux() else None


def syscall(name: str, *arguments: int | bytes) -> int:
    """Call the kernel. Bytes are passed as a pointer to them."""
    if ARCH is None:
        raise OSError(errno.ENOSYS, f"{name}: not known on {sys.platform} {platform.machine()}")
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(name, _libc().syscall(ctypes.c_long(ARCH.numbers[name]), *converted))


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    zero = ctypes.c_ulong(0)
    _checked(f"prctl({option})", _libc().prctl(option, ctypes.c_ulong(value), zero, zero, zero))


def drop_capabilities() -> None:
    """Give up root's powers for good, over exec too: the bounding set first, since dropping it needs a capability."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # past the last capability of this kernel, or an ordinary user
            break
    header = _CAPABILITY_VERSION_3.to_bytes(4, sys.byteorder) + bytes(4)
    syscall("capset", header, bytes(24))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result
