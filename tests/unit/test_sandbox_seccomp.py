"""The system call filter of both architectures, run by a small interpreter of its instructions."""

import errno
import socket
import struct

import pytest

from manege.sandbox.seccomp import build_filter
from manege.sandbox.syscalls import _ARCHS

ALLOW, KILL, CONTROLLER = 0x7FFF0000, 0x80000000, 4711
NEW_USER, FAST_OPEN, MPTCP = 0x10000000, 0x20000000, 262
INET, STREAM = socket.AF_INET, socket.SOCK_STREAM


def verdict(program, number, *arguments, audit):
    """What the kernel would do: 0 for allow, an error number, or KILL."""
    arguments = [value & 0xFFFFFFFFFFFFFFFF for value in arguments] + [0] * (6 - len(arguments))
    data = struct.pack("<IIQ6Q", number, audit, 0, *arguments)
    instructions = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator = position = 0
    while True:
        code, if_true, if_false, operand = instructions[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x06:
            return {ALLOW: 0, KILL: KILL}.get(operand, operand & 0xFFFF)
        else:
            holds = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[code]
            position += if_true if holds else if_false


CASES = [
    ("socket", (INET, STREAM, 0), 0),
    ("socket", (socket.AF_INET6, STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 6), 0),
    ("socket", (INET, STREAM, MPTCP), errno.EPROTONOSUPPORT),
    ("socket", (INET, socket.SOCK_DGRAM, 0), errno.EPROTONOSUPPORT),
    ("socket", (INET, socket.SOCK_RAW, 1), errno.EPROTONOSUPPORT),
    ("socket", (socket.AF_UNIX, STREAM, 0), errno.EAFNOSUPPORT),
    ("socket", (16, 3, 0), errno.EAFNOSUPPORT),
    ("socket", (40, STREAM, 0), errno.EAFNOSUPPORT),
    ("socketpair", (socket.AF_UNIX, STREAM, 0), 0),
    ("socketpair", (INET, STREAM, 0), errno.EAFNOSUPPORT),
    ("sendto", (3, 0, 1, 0), 0),
    ("sendto", (3, 0, 1, FAST_OPEN), errno.EPERM),
    ("sendmsg", (3, 0, FAST_OPEN), errno.EPERM),
    ("sendmsg", (3, 0, 0x4000), 0),
    ("sendmmsg", (3, 0, 1, FAST_OPEN), errno.EPERM),
    ("clone", (0x11,), 0),
    ("clone", (0x003D0F00,), 0),
    ("clone", (NEW_USER | 0x11,), errno.EPERM),
    ("clone3", (), errno.ENOSYS),
    ("unshare", (0,), errno.EPERM),
    ("kill", (1234, 9), 0),
    ("kill", (0, 9), 0),
    ("kill", (-1, 9), errno.EPERM),
    ("kill", (CONTROLLER, 9), errno.EPERM),
    ("kill", (-CONTROLLER, 9), errno.EPERM),
    ("tgkill", (CONTROLLER, CONTROLLER, 9), errno.EPERM),
    ("pidfd_open", (CONTROLLER,), errno.EPERM),
    ("pidfd_open", (1234,), 0),
    ("prlimit64", (CONTROLLER,), errno.EPERM),
    ("prlimit64", (0,), 0),
    ("ptrace", (16, 1), errno.EPERM),
    ("io_uring_setup", (), errno.EPERM),
    ("process_vm_readv", (1,), errno.EPERM),
    ("keyctl", (), errno.EPERM),
    ("mount", (), errno.EPERM),
    ("landlock_restrict_self", (), 0),
]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(("name", "arguments", "want"), CASES, ids=[f"{name}{args}" for name, args, _ in CASES])
def test_each_call_is_answered_as_the_table_says(machine, name, arguments, want):
    arch = _ARCHS[machine]
    program = build_filter(arch, protected_pids=[CONTROLLER])
    assert verdict(program, arch.numbers[name], *arguments, audit=arch.audit) == want


UNIX, DGRAM = socket.AF_UNIX, socket.SOCK_DGRAM
OPEN_CASES = [
    ({"unix": True}, (UNIX, STREAM, 0), 0),
    ({"unix": True}, (UNIX, DGRAM, 0), 0),
    ({"unix": True}, (INET, STREAM, 0), 0),
    ({"unix": True}, (INET, DGRAM, 0), errno.EPROTONOSUPPORT),
    ({"unix": True}, (16, 3, 0), errno.EAFNOSUPPORT),
    ({"udp": True}, (INET, DGRAM, 0), 0),
    ({"udp": True}, (INET, DGRAM | socket.SOCK_CLOEXEC, socket.IPPROTO_UDP), 0),
    ({"udp": True}, (INET, DGRAM, socket.IPPROTO_ICMP), errno.EPROTONOSUPPORT),
    ({"udp": True}, (INET, STREAM, MPTCP), errno.EPROTONOSUPPORT),
    ({"udp": True}, (UNIX, STREAM, 0), errno.EAFNOSUPPORT),
]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(("opened", "arguments", "want"), OPEN_CASES, ids=[f"{case[:2]}" for case in OPEN_CASES])
def test_unix_sockets_and_udp_can_be_opened_one_by_one(machine, opened, arguments, want):
    arch = _ARCHS[machine]
    program = build_filter(arch, protected_pids=[], **opened)
    assert verdict(program, arch.numbers["socket"], *arguments, audit=arch.audit) == want


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls_of_a_foreign_architecture_kill(machine):
    program = build_filter(_ARCHS[machine], protected_pids=[])
    assert verdict(program, 1, audit=0x40000003) == KILL


def test_the_x32_calls_are_unknown():
    program = build_filter(_ARCHS["x86_64"], protected_pids=[])
    assert verdict(program, 0x40000000 + 41, audit=_ARCHS["x86_64"].audit) == errno.ENOSYS
