"""Seccomp: a system call filter, assembled by hand (classic BPF), so that no library is needed.

`build_filter` is pure; `install` applies its bytes to this process for good. Denied calls fail with an error number
that programs know how to handle; only calls of a foreign architecture kill.

What it closes: other processes' memory and signals, kernel interfaces with a history of holes (io_uring, bpf, keys,
perf), new namespaces and mounts, and every socket but plain TCP and, where they are harmless, Unix or UDP ones: no
netlink, vsock, packet; and the two ways of connecting by TCP that Landlock does not see, MPTCP (a protocol number) and
TCP Fast Open (a flag of send).
"""

import ctypes
import errno
import socket
import struct
from collections.abc import Iterable, Sequence

from manege.sandbox.syscalls import Arch, syscall

__all__ = ["build_filter", "build_watch_filter", "has_seccomp", "install"]

_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_KILL_PROCESS, _ERRNO, _ALLOW, _NOTIFY = 0x80000000, 0x00050000, 0x7FFF0000, 0x7FC00000

# <linux/bpf_common.h>: class | size | mode of the few instructions that are needed.
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_X32_BIT = 0x40000000
# CLONE_NEW*; CLONE_NEWTIME shares a bit with the exit signal and can only be asked of clone3 and unshare.
_NEW_NAMESPACES = 0x7E020000
_MSG_FASTOPEN = 0x20000000
_SOCK_TYPE_MASK = 0xF

_DENIED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open", "userfaultfd"),
    *("add_key", "request_key", "keyctl", "kexec_load", "init_module", "finit_module", "delete_module"),
    *("unshare", "setns", "mount", "umount2", "pivot_root", "open_by_handle_at"),
    *("mount_setattr", "move_mount", "open_tree", "fsopen", "fspick"),
)
_TARGETED = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "prlimit64")
"""Their first argument is a process (or minus a process group), which the kernel checks by user id only."""

_Instruction = tuple[int, int, int, int]
"""Code, instructions to skip if true, if false, operand."""


def has_seccomp() -> bool:
    """Whether this kernel filters system calls and we know this machine's numbers."""
    try:
        syscall("seccomp", _GET_ACTION_AVAIL, 0, struct.pack("=I", _ERRNO))
    except OSError:
        return False
    return True


def build_filter(arch: Arch, *, protected_pids: Iterable[int], unix: bool = False, udp: bool = False) -> bytes:
    """The program. Processes in `protected_pids`, and all processes at once, cannot be signalled or given limits.
    `unix`: allow Unix sockets, where a network namespace and a root of its own keep others' out of reach; `udp`: allow
    UDP, where the network is open anyway."""
    number = arch.numbers
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, arch.audit),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        # x86 only, harmless elsewhere: the x32 calls would bypass every comparison below.
        (_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT),
        _deny(errno.ENOSYS),
    ]
    for name in _DENIED:
        program += [(_JUMP_EQUAL, 0, 1, number[name]), _deny(errno.EPERM)]
    # Its flags are behind a pointer; without it, C libraries use clone, whose flags can be checked.
    program += [(_JUMP_EQUAL, 0, 1, number["clone3"]), _deny(errno.ENOSYS)]
    program += _when(number["clone"], [_argument(0), (_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACES), _deny(errno.EPERM)])
    targets = [-1, *(sign * pid for pid in protected_pids for sign in (1, -1))]
    for name in _TARGETED:
        program += _when(
            number[name],
            [
                _argument(0),
                *(item for pid in targets for item in ((_JUMP_EQUAL, 0, 1, pid & 0xFFFFFFFF), _deny(errno.EPERM))),
            ],
        )
    for name, flags_position in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
        check = [_argument(flags_position), (_JUMP_ANY_BIT, 0, 1, _MSG_FASTOPEN), _deny(errno.EPERM)]
        program += _when(number[name], check)
    types = (socket.SOCK_STREAM, *((socket.SOCK_DGRAM,) if udp else ()))
    protocols = (0, socket.IPPROTO_TCP, *((socket.IPPROTO_UDP,) if udp else ()))
    program += _when(
        number["socket"],
        [
            _argument(0),
            *([(_JUMP_EQUAL, 0, 1, socket.AF_UNIX), (_RETURN, 0, 0, _ALLOW)] if unix else []),
            *_require((socket.AF_INET, socket.AF_INET6), errno.EAFNOSUPPORT),
            _argument(1),
            (_AND, 0, 0, _SOCK_TYPE_MASK),
            *_require(types, errno.EPROTONOSUPPORT),
            _argument(2),
            *_require(protocols, errno.EPROTONOSUPPORT),
        ],
    )
    program += _when(number["socketpair"], [_argument(0), *_require((socket.AF_UNIX,), errno.EAFNOSUPPORT)])
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def build_watch_filter(arch: Arch, names: Iterable[str]) -> bytes:
    """A program that lets a listener see these calls first. What `build_filter` denies, it never gets to see."""
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, arch.audit),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for name in names:
        program += [(_JUMP_EQUAL, 0, 1, arch.numbers[name]), (_RETURN, 0, 0, _NOTIFY)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in [*program, (_RETURN, 0, 0, _ALLOW)])


def install(program: bytes, *, flags: int = 0) -> int:
    """Apply the filter to this process and all that it will start; returns its listener, if `flags` ask for one. Needs
    no_new_privs."""
    instructions = ctypes.create_string_buffer(program, len(program))
    sock_fprog = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))
    return syscall("seccomp", _SET_MODE_FILTER, flags, sock_fprog)


def _deny(code: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


def _argument(position: int) -> _Instruction:
    """Load the low half of an argument; all that are compared here are 32 bits wide. Little-endian machines."""
    return (_LOAD, 0, 0, 16 + 8 * position)


def _require(values: Sequence[int], code: int) -> list[_Instruction]:
    """Go on if the loaded value is one of `values`, else fail."""
    jumps = [(_JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [*jumps, _deny(code)]


def _when(number: int, body: list[_Instruction]) -> list[_Instruction]:
    """`body` for one system call, which is allowed when the body does not deny it."""
    return [(_JUMP_EQUAL, 0, len(body) + 1, number), *body, (_RETURN, 0, 0, _ALLOW)]
