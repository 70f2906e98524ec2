"""The filter that lets a supervisor see calls, as instructions."""

import struct

import pytest

from manege.sandbox.seccomp import build_watch_filter
from manege.sandbox.syscalls import _ARCHS
from manege.sandbox.watch import _WATCHED

NOTIFY, ALLOW = 0x7FC00000, 0x7FFF0000


@pytest.mark.parametrize("name", _ARCHS)
def test_every_way_to_open_execute_and_connect_is_seen_and_nothing_else(name):
    arch = _ARCHS[name]
    watched = [call for call in _WATCHED if call in arch.numbers]
    assert set(_WATCHED) - set(watched) == (set() if name == "x86_64" else {"open"})  # aarch64 has no `open`
    program = build_watch_filter(arch, watched)
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    # Another architecture's numbers mean other calls: the denying filter kills those.
    assert code[:4] == [(0x20, 0, 0, 4), (0x15, 1, 0, arch.audit), (0x06, 0, 0, ALLOW), (0x20, 0, 0, 0)]
    body, end = code[4:-1], code[-1]
    assert body[::2] == [(0x15, 0, 1, arch.numbers[call]) for call in watched]
    assert set(body[1::2]) == {(0x06, 0, 0, NOTIFY)}
    assert end == (0x06, 0, 0, ALLOW)
