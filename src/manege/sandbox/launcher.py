"""Start, await and kill process trees from an asyncio program.

The caller may have threads, sockets and secrets, so it never forks: it asks a warm parent, one per `module:function`
and role and one for all commands, started on first use with a clean environment. Each process tree has a lifeline, a
socket to its supervisor: it carries the Exit when every process of the tree is dead, and shutting it is the order to
kill. If the caller is killed, its lifelines shut and its process trees die.
"""

import asyncio
import contextlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from manege.errors import HarnessError
from manege.sandbox.spec import LISTENER, Exit, ProcessSpec, Program, Seen

__all__ = ["Launcher", "search_path"]

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from manege.sandbox.warm import main; "
_BOOT += "main(int(sys.argv[1]), sys.argv[3], sys.argv[4], sys.argv[5:])"


def search_path() -> str:
    """PATH of every program that we start: this interpreter's folder and the system's."""
    return os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])


class Launcher:
    """Runs process trees. `close` ends the warm parents; what still runs is killed by cancelling its `run`."""

    def __init__(self, *, import_paths: Sequence[str] | None = None) -> None:
        """`import_paths`: where functions are imported from; None: as here, and the current folder."""
        self._import_paths = [*sys.path, os.getcwd()] if import_paths is None else list(import_paths)
        self._parents: dict[tuple[str, str], asyncio.Task[_WarmParent]] = {}

    async def check(self, program: Program, *, role: str, preload: Sequence[str] = ()) -> None:
        """Make ready to start a program: import its function, or find its command. Raises HarnessError.

        `preload`: modules that the arguments of a function need, imported once instead of in each fork.
        """
        if not isinstance(program, str):
            if not program:
                raise HarnessError(f"{role}: the command is an empty list; name a program")
            if shutil.which(program[0], path=search_path()) is None:
                raise HarnessError(
                    f"{role}: command {program[0]!r} does not exist or is not executable (searched {search_path()}); "
                    "give its absolute path"
                )
        await self._parent(program, role, preload)

    async def run(
        self, spec: ProcessSpec, timeout_s: float, *, on_listener: Callable[[socket.socket], None] | None = None
    ) -> Exit:
        """Start a process tree and wait until all of it is dead; it is killed when its time is used up. Whatever
        happens, cancellation included, no process is left. Raises HarnessError if the program cannot be started.

        `on_listener` is called, before the program starts, with the socket that listens inside if the policy has a
        `listen_port`; it is the callee's to close.
        """
        name = f"{spec.role} {spec.program!r}"
        lifeline = await self._start(spec)
        receiving = asyncio.create_task(_receive(lifeline, on_listener), name=f"wait for {name}")
        try:
            in_time, _ = await asyncio.wait({receiving}, timeout=timeout_s)
        finally:
            with contextlib.suppress(OSError):  # it has ended by itself
                lifeline.shutdown(socket.SHUT_WR)
            received = await asyncio.shield(receiving)
        if not received:
            raise HarnessError(f"{name}: its supervisor was killed; processes of it may be left")
        fields = json.loads(received)
        ended = Exit(**fields | {"seen": [Seen(**seen) for seen in fields["seen"]]})
        if ended.error is not None:
            raise HarnessError(f"{name} could not be started: {ended.error}")
        return ended if in_time else replace(ended, timed_out=True)

    async def close(self) -> None:
        """End the warm parents. Safe to repeat."""
        for opening in self._parents.values():
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError, HarnessError):
                (await opening).close()
        self._parents.clear()

    async def _start(self, spec: ProcessSpec) -> socket.socket:
        """Returns the lifeline."""
        parent = await self._parent(spec.program, spec.role)
        lifeline, far_end = socket.socketpair()
        lifeline.setblocking(False)
        with far_end, tempfile.TemporaryFile() as request:
            request.write(pickle.dumps(spec))
            request.seek(0)
            parent.send([request.fileno(), far_end.fileno()])
        return lifeline

    async def _parent(self, program: Program, role: str, preload: Sequence[str] = ()) -> "_WarmParent":
        """The one that runs; a new one if there is none, or it could not be started, or was killed."""
        key = (program, role) if isinstance(program, str) else ("", "command")
        opening = self._parents.get(key)
        if opening is None or (opening.done() and (opening.exception() or opening.result().has_died())):
            parent = _WarmParent.open(*key, preload=preload, import_paths=self._import_paths)
            opening = self._parents[key] = asyncio.create_task(parent, name=f"warm parent of {role}")
        return await asyncio.shield(opening)


async def _receive(lifeline: socket.socket, on_listener: Callable[[socket.socket], None] | None) -> bytes:
    """All that comes until the far end is closed, but for a listening socket, which comes first."""
    received = bytearray()
    with lifeline:
        while True:
            await _readable(lifeline)
            try:
                chunk, descriptors, _, _ = socket.recv_fds(lifeline, 1 << 16, 1)
            except BlockingIOError:
                continue
            if not chunk:
                return bytes(received)
            for descriptor in descriptors:
                listener = socket.socket(fileno=descriptor)
                if on_listener is None:
                    listener.close()
                else:
                    on_listener(listener)
            received += chunk.removeprefix(LISTENER) if descriptors else chunk


async def _readable(opened: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(opened, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(opened)


class _WarmParent:
    """A running warm parent, seen from outside."""

    def __init__(self, popen: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._popen = popen
        self._control = control

    @classmethod
    async def open(
        cls, program: str, role: str, *, preload: Sequence[str], import_paths: Sequence[str]
    ) -> "_WarmParent":
        """Start it and wait until it has imported the program. Raises HarnessError."""
        control, far_end = socket.socketpair()
        control.setblocking(False)
        with far_end:
            number = far_end.fileno()
            popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(number), json.dumps(import_paths), program, role, *preload],
                # Numeric libraries would start threads when they are imported, and a fork must have none.
                env={"PATH": search_path(), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,
            )
        parent = cls(popen, control)
        try:
            answer = await asyncio.get_running_loop().sock_recv(control, 1 << 16)
        except BaseException:
            parent.close()
            raise
        control.setblocking(True)
        if answer != b"\n":
            parent.close()
            message = answer.decode("utf-8", "replace") or f"the warm parent of {program!r} died; see its output above"
            raise HarnessError(message)
        return parent

    def send(self, descriptors: Sequence[int]) -> None:
        """Ask for a process."""
        socket.send_fds(self._control, [b"s"], descriptors)

    def has_died(self) -> bool:
        """Whether something killed it; then nothing of it is left."""
        if self._popen.poll() is None:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Kill it, also in the middle of an import; it holds nothing that could be lost, and its forks go on."""
        self._control.close()
        self._popen.kill()
        self._popen.wait()
