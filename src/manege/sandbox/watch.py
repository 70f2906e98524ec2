"""Seeing what an agent tries: opens, executions and connections, by seccomp's user notification.

The agent's process installs a filter whose listener it hands to its supervisor (`hand_over`); each such call then waits
until the supervisor has looked at it (`Watcher`), and goes on in any case. So nothing is enforced here, and an agent
that changes its memory meanwhile deceives only the report. Some ten microseconds a call; a supervisor that dies takes
its agent along, so no agent waits for nobody.
"""

import array  # noqa: F401  # `send_fds` imports it, and an import opens files, which wait for a listener
import ctypes
import fcntl
import os
import pwd
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence

from manege.sandbox.seccomp import build_watch_filter, install
from manege.sandbox.spec import ProcessSpec, Seen
from manege.sandbox.suspects import Suspect, Suspects
from manege.sandbox.syscalls import ARCH, PR_SET_NO_NEW_PRIVS, prctl, syscall

__all__ = ["Watcher", "available", "hand_over", "suspects_of"]

_WATCHED = ("open", "openat", "openat2", "execve", "execveat", "connect")
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
# <linux/seccomp.h>: struct seccomp_notif (id, pid, flags, seccomp_data) and its answer.
_REQUEST = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_CONTINUE = 1
_GET_SIZES = 3
_RECEIVE, _SEND = 0xC0502100, 0xC0182101

_MAX_DISTINCT, _MAX_TOLD = 1000, 100
_MAX_CACHED = 4096
_MAX_ARGUMENTS = 32
_PATH_BYTES, _WORD_BYTES = 1024, 4096
_PAGE = 4096
_CREATES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def available() -> bool:
    """Tried in a thread that ends at once, since a filter is for good. An outer listener forbids another one."""
    found: list[int] = []

    def attempt() -> None:
        try:
            sizes = bytearray(6)
            pointer = ctypes.addressof((ctypes.c_char * 6).from_buffer(sizes))
            syscall("seccomp", _GET_SIZES, 0, pointer)
            if struct.unpack("=HHH", sizes)[:2] == (_REQUEST.size, _RESPONSE.size):
                prctl(PR_SET_NO_NEW_PRIVS, 1)
                found.append(_listen(()))
        except OSError:
            pass

    thread = threading.Thread(target=attempt, name="try seccomp notification")
    thread.start()
    thread.join()
    for listener in found:
        os.close(listener)
    return bool(found)


def hand_over(channel: int) -> None:
    """Be watched from now on, by the Watcher that the channel is of. Needs no_new_privs."""
    with socket.socket(fileno=channel) as opened:
        listener = _listen(_WATCHED)
        socket.send_fds(opened, [b"w"], [listener])
        os.close(listener)


def suspects_of(spec: ProcessSpec) -> Suspects:
    """Of a process with a policy."""
    policy = spec.policy
    assert policy is not None
    return Suspects(
        own=_names([*policy.writable, *policy.folders]),
        given=_names(policy.readable),
        private=_names(policy.private),
        home=pwd.getpwuid(os.getuid()).pw_dir,
        path=spec.env.get("PATH", os.defpath),
    )


def _names(paths: Sequence[str]) -> Sequence[str]:
    """A path may be asked for by its own name, or by that without links."""
    return list(dict.fromkeys(each for path in paths for each in (os.path.abspath(path), os.path.realpath(path))))


def _listen(names: Sequence[str]) -> int:
    assert ARCH is not None
    program = build_watch_filter(ARCH, [name for name in names if name in ARCH.numbers])
    return install(program, flags=_NEW_LISTENER | _WAIT_KILLABLE)


class Watcher:
    """The supervisor's end: answers each call, and counts what is suspicious."""

    def __init__(self, suspects: Suspects) -> None:
        assert ARCH is not None
        self._channel, channel = socket.socketpair()
        self.channel = channel.detach()
        """For `hand_over`, in a fork."""
        self._listener: int | None = None
        self._suspects = suspects
        self._names = {ARCH.numbers[name]: name for name in _WATCHED if name in ARCH.numbers}
        self._counts: Counter[Suspect] = Counter()
        self._harmless: set[tuple[bytes, bool]] = set()
        self._last_command: dict[int, Sequence[str]] = {}
        self._memory = _Memory()

    def begin(self, poll: select.poll) -> None:
        """Wait for the agent's process; called after the fork."""
        os.close(self.channel)
        poll.register(self._channel, select.POLLIN)

    def serve(self, descriptor: int, event: int, poll: select.poll) -> None:
        """Take what is ready, if the descriptor is ours: the listener, or one call."""
        if descriptor == self._listener:
            if event & select.POLLHUP:  # all that was watched is dead
                poll.unregister(descriptor)
            else:
                self._answer(descriptor)
        elif descriptor == self._channel.fileno():
            poll.unregister(descriptor)
            _, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
            for listener in descriptors:  # none: the process has died
                self._listener = listener
                poll.register(listener, select.POLLIN)

    def _answer(self, listener: int) -> None:
        request = bytearray(_REQUEST.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, request)
        except OSError:  # its process was killed meanwhile
            return
        call, pid, _, number, _, _, *arguments = _REQUEST.unpack(request)
        try:
            self._look(pid, self._names[number], arguments)
        except Exception:  # whatever an agent passes, its supervisor lives: else its failures would be ours
            pass
        finally:
            try:
                fcntl.ioctl(listener, _SEND, _RESPONSE.pack(call, 0, 0, _CONTINUE))
            except OSError:  # killed
                pass

    def seen(self) -> Sequence[Seen]:
        """What flags first, then what was tried most often."""
        ordered = sorted(self._counts.items(), key=lambda item: (not item[0].flags, -item[1], item[0].detail))
        return [
            Seen(kind=suspect.kind, detail=suspect.detail, count=count, flags=suspect.flags)
            for suspect, count in ordered[:_MAX_TOLD]
        ]

    def _look(self, pid: int, name: str, arguments: Sequence[int]) -> None:
        if name.startswith("open"):
            self._look_at_open(pid, name, arguments)
        elif name == "connect":
            self._note(self._address(pid, arguments[1], arguments[2]))
        else:
            self._look_at_command(pid, arguments[1 if name == "execve" else 2])

    def _look_at_open(self, pid: int, name: str, arguments: Sequence[int]) -> None:
        folder, at = (-100, 0) if name == "open" else (arguments[0], 1)
        flags = arguments[at + 1]
        if name == "openat2":
            (flags,) = struct.unpack("=Q", self._memory.read(pid, flags, 8))
        path, writes = self._memory.text(pid, arguments[at], _PATH_BYTES), bool(flags & _CREATES)
        if (path, writes) in self._harmless:
            return
        text, is_absolute = path.decode("utf-8", "replace"), path.startswith(b"/")
        if not is_absolute:
            if not self._suspects.leads_away(text):
                return
            text = os.path.join(_folder(pid, folder), text)
        suspect = self._suspects.of_open(text, writes=writes)
        if suspect is None and is_absolute and len(self._harmless) < _MAX_CACHED:
            self._harmless.add((path, writes))
        self._note(suspect)

    def _look_at_command(self, pid: int, argv: int) -> None:
        words: list[str] = []
        pointers = self._memory.read(pid, argv, 8 * _MAX_ARGUMENTS)
        for (pointer,) in struct.iter_unpack("=Q", pointers[: len(pointers) // 8 * 8]):
            if not pointer:
                break
            words.append(self._memory.text(pid, pointer, _WORD_BYTES).decode("utf-8", "replace"))
        # A search along PATH is one execution after another, until one succeeds.
        if self._last_command.get(pid) != words:
            if len(self._last_command) >= _MAX_CACHED:
                self._last_command.clear()
            self._last_command[pid] = words
            self._note(self._suspects.of_command(words))

    def _address(self, pid: int, pointer: int, size: int) -> Suspect | None:
        address = self._memory.read(pid, pointer, min(size, 128))
        (family,) = struct.unpack("=H", address[:2])
        if family == socket.AF_UNIX:
            return self._suspects.of_socket(address[2:].split(b"\0", 1)[0].decode("utf-8", "replace"))
        if family not in (socket.AF_INET, socket.AF_INET6):
            return None
        (port,) = struct.unpack("!H", address[2:4])
        host = address[4:8] if family == socket.AF_INET else address[8:24]
        return self._suspects.of_address(socket.inet_ntop(family, host), port)

    def _note(self, suspect: Suspect | None) -> None:
        if suspect is not None and (suspect in self._counts or len(self._counts) < _MAX_DISTINCT):
            self._counts[suspect] += 1


def _folder(pid: int, descriptor: int) -> str:
    """Where a relative path begins. Raises OSError."""
    number = descriptor & 0xFFFFFFFF
    return os.readlink(f"/proc/{pid}/cwd" if number == 0xFFFFFF9C else f"/proc/{pid}/fd/{number}")


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Memory:
    """Of other processes."""

    def __init__(self) -> None:
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        vectors = ctypes.c_void_p
        self._read.argtypes = (ctypes.c_int, vectors, ctypes.c_ulong, vectors, ctypes.c_ulong, ctypes.c_ulong)
        self._read.restype = ctypes.c_ssize_t
        self._buffer = ctypes.create_string_buffer(_WORD_BYTES)
        self._local = _Vector(ctypes.addressof(self._buffer), 0)
        self._remote = (_Vector * 2)()
        self._local_at, self._remote_at = ctypes.addressof(self._local), ctypes.addressof(self._remote)

    def read(self, pid: int, pointer: int, size: int) -> bytes:
        """As much as is there, at most `_WORD_BYTES`. Raises OSError."""
        # The next page may not exist, and a part of a vector is not read.
        first = min(size, _PAGE - pointer % _PAGE)
        self._local.length = size
        self._remote[0].base, self._remote[0].length = pointer, first
        self._remote[1].base, self._remote[1].length = pointer + first, size - first
        got = self._read(pid, self._local_at, 1, self._remote_at, 2, 0)
        if got < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"process_vm_readv: {os.strerror(code)}")
        return ctypes.string_at(self._local.base, got)

    def text(self, pid: int, pointer: int, size: int) -> bytes:
        """Up to its end, or the first `size` bytes."""
        return self.read(pid, pointer, size).partition(b"\0")[0]
