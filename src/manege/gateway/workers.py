"""A gateway of several processes behind one port: the first one accepts, and gives each connection to a worker.

The first process listens, at the port and at the controllers' door, and keeps so many workers alive. Whoever comes is
given to the worker that has the fewest, since connections stay where they once went for as long as their agent lives:
chance (SO_REUSEPORT) or who wakes first (one socket for all) would fill one worker to a third or thrice more than its
share. The first process answers nothing itself and has no state to lose: what waits to be accepted outlives a worker.

Workers are gateways of one database, as if each had its own port. One that ends, however it does, is started again; the
others learn of it. All end when the first process ends, however it does: each sees the end of its stream (`given.py`).

Concurrency: one event loop; no await stands between the choice of a worker and the giving.
"""

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from manege.errors import ConfigError
from manege.gateway.given import CLOSED, CONNECTION, ENDED, KNOCK, READY, Post
from manege.gateway.handed import open_door
from manege.gateway.server import bound, url_of
from manege.logs import get_logger, kv

__all__ = ["Workers"]

RESTART_S = 1.0
"""Between two starts of a worker at least."""
STOP_S = 20.0
"""How long a worker may take to end: its answers in flight go out, what it wrote is indexed."""
RETRY_S = 1.0
"""After nothing could be accepted: open files are used up."""
GIVE_S = 0.01
"""Before the next try when no worker can take anything: all have just ended, or have yet to take what waits."""

_log = get_logger("gateway")


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    process: asyncio.subprocess.Process
    channel: socket.socket
    is_ready: bool = False
    num_given: int = 0
    """Connections that it was given and has not closed."""
    num_ever: int = 0
    """Connections that it was ever given: among equals, turns are taken."""


class Workers:
    """`await start()`, then `await run()` until cancelled."""

    def __init__(self, command: Callable[[Post], Sequence[str]], *, number: int, host: str, port: int) -> None:
        """`command`: a worker's, whose `Given` is made from the post. Raises ConfigError when the port is in use."""
        self._command, self._number = command, number
        self._listener = bound(host, port)
        self._listener.setblocking(False)
        self._door, self._door_name = open_door()
        self.url = url_of(host, self._listener.getsockname()[1])
        self._group = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._workers: dict[int, _Worker] = {}
        self._serving = asyncio.Event()
        """Some worker is ready."""

    async def run(self, started: Callable[[], None]) -> None:
        """Until cancelled; then all end. `started` is called once all serve. Raises ConfigError when one ends before it
        has served: it has said why."""
        try:
            async with asyncio.TaskGroup() as group:
                # Alone, since it may have to migrate the database, or to say what is wrong.
                await self._begin(group, range(1))
                await self._begin(group, range(1, self._number))
                started()
                group.create_task(self._accept(self._listener, CONNECTION), name="accepting")
                if self._door is not None:
                    group.create_task(self._accept(self._door, KNOCK), name="door")
        except* ConfigError as errors:
            raise errors.exceptions[0] from None
        finally:
            self._listener.close()
            if self._door is not None:
                self._door.close()

    async def _begin(self, group: asyncio.TaskGroup, indices: Sequence[int]) -> None:
        ready = [asyncio.Event() for _ in indices]
        for index, event in zip(indices, ready, strict=True):
            group.create_task(self._keep(index, event), name=f"worker-{index}")
        for event in ready:
            await event.wait()

    async def _keep(self, index: int, ready: asyncio.Event) -> None:
        """Until cancelled, or it ends before it was ever ready."""
        while True:
            begun_s = time.monotonic()
            code = await self._live(index, ready)
            if not ready.is_set():
                raise ConfigError(f"a worker ended before it served (exit code {code}); its last line says why")
            _log.warning(kv("a worker ended and is started again", worker=index, exit_code=code))
            await asyncio.sleep(begun_s + RESTART_S - time.monotonic())

    async def _live(self, index: int, ready: asyncio.Event) -> int:
        """Its exit code."""
        channel, its_channel = socket.socketpair()
        with channel:
            with its_channel:
                post = Post(
                    channel=its_channel.fileno(),
                    url=self.url,
                    group=self._group,
                    index=index,
                    door=self._door_name,
                )
                # A session of its own: at Ctrl-C the first process decides.
                process = await asyncio.create_subprocess_exec(
                    *self._command(post),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[its_channel.fileno()],
                    start_new_session=True,
                )
            channel.setblocking(False)
            worker = self._workers[index] = _Worker(process=process, channel=channel)
            try:
                await self._listen(worker, ready)
            finally:
                del self._workers[index]
                self._note_serving()
                for other in self._workers.values():
                    with suppress(OSError):
                        other.channel.send(ENDED)
                channel.close()
                await _end(process)
        return process.returncode or 0

    async def _listen(self, worker: _Worker, ready: asyncio.Event) -> None:
        """To a worker, until its end."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                said = await loop.sock_recv(worker.channel, 4096)
            except ConnectionError:
                return
            if not said:
                return
            worker.num_given -= said.count(CLOSED)
            if READY in said:
                worker.is_ready = True
                ready.set()
                self._note_serving()

    async def _accept(self, listener: socket.socket, kind: bytes) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Who comes while there is no worker waits in the listener.
            await self._serving.wait()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                _log.warning(kv("no connection can be accepted", reason=error))
                await asyncio.sleep(RETRY_S)
                continue
            with connection:
                while not self._give(kind, connection):
                    await asyncio.sleep(GIVE_S)

    def _give(self, kind: bytes, connection: socket.socket) -> bool:
        """To the worker that has the fewest, of those that take it; whether one did."""
        ready = [worker for worker in self._workers.values() if worker.is_ready]
        for worker in sorted(ready, key=lambda worker: (worker.num_given, worker.num_ever)):
            # Full, or just gone.
            with suppress(OSError):
                socket.send_fds(worker.channel, [kind], [connection.fileno()])
                worker.num_given += 1
                worker.num_ever += 1
                return True
        return False

    def _note_serving(self) -> None:
        if any(worker.is_ready for worker in self._workers.values()):
            self._serving.set()
        else:
            self._serving.clear()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Return when it has ended, as the end of its stream asks it to."""
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        _log.warning(kv("a worker does not end and is killed", pid=process.pid))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
