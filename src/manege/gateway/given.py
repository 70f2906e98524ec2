"""A worker's end of a gateway of several processes: what the first process gives it (`workers.py`).

In: one byte per message on a stream socket, from the first process: a connection that it accepted, a controller at the
door (`handed.py`), each with its socket; or that another worker has ended. Out: that this worker serves, and each end
of what it was given, so that the first process knows who has the fewest. The end of the stream is the end of the first
process, or its wish: the worker then stops as at SIGTERM.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from manege.listening import readable

__all__ = ["CLOSED", "CONNECTION", "ENDED", "KNOCK", "READY", "Given", "Post"]

CONNECTION, KNOCK, ENDED = b"c", b"k", b"e"
"""To a worker: a connection to the port, one to the door, and that another worker is no more."""
READY, CLOSED = b"r", b"-"
"""From a worker: it serves; something that it was given is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What a worker is told at its start."""

    channel: int
    """Descriptor of its end of the stream."""
    url: str
    """Of the gateway."""
    group: str
    """The gateway among those of its database."""
    index: int
    """The worker in it; one that takes the place of a dead one has the same."""
    door: str | None
    """Where controllers of this machine knock; None: nowhere."""

    @property
    def name(self) -> str:
        """Of the worker among the gateways of its database."""
        return f"{self.group}-{self.index}"

    def dumped(self) -> str:
        """For its command line."""
        return json.dumps(asdict(self))

    @classmethod
    def loaded(cls, text: str) -> "Post":
        """The inverse."""
        return cls(**json.loads(text))


class Given:
    """Of one worker."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self._channel = socket.socket(fileno=post.channel)
        self._channel.setblocking(False)
        self._ended = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def ended(self) -> None:
        """Return when the first process wants no more of this one, or is gone."""
        await self._ended.wait()

    async def run(
        self, server: uvicorn.Server, knock: Callable[[socket.socket], None], lost: Callable[[], None]
    ) -> None:
        """Serve what comes on a server that runs, until nothing more can come, or `close`. `knock` takes a controller's
        connection, `lost` is called when another worker has ended."""
        self._running = asyncio.current_task()
        self._tell(READY)
        try:
            async with asyncio.TaskGroup() as group:
                while (message := await self._next()) is not None:
                    kind, given = message
                    if given is None:
                        lost()
                    elif kind == KNOCK:
                        knock(given)
                    else:
                        group.create_task(self._adopt(given, server), name="given-connection")
        finally:
            self._ended.set()
            self._channel.close()

    async def close(self) -> None:
        """Take nothing more. Safe to repeat."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    def closed(self) -> None:
        """Something that was given is closed."""
        self._tell(CLOSED)

    async def _adopt(self, given: socket.socket, server: uvicorn.Server) -> None:
        protocol = partial(_Connection, server, self.closed)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, given)
        except OSError:
            # It has gone already.
            given.close()
            self.closed()

    async def _next(self) -> tuple[bytes, socket.socket | None] | None:
        """None: nothing more comes."""
        while True:
            await readable(self._channel)
            try:
                kind, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
            except BlockingIOError:
                continue
            except ConnectionError:
                return None
            if not kind:
                return None
            given = socket.socket(fileno=descriptors[0]) if descriptors else None
            if given is not None:
                given.setblocking(False)
            # One that was lost on its way, since too many files are open here, is closed by that.
            if given is not None or kind == ENDED:
                return kind, given
            self.closed()

    def _tell(self, message: bytes) -> None:
        try:
            self._channel.send(message)
        except OSError:
            # The first process is gone, which `run` learns of; or, closed here, of no more interest.
            pass


class _Connection(HttpToolsProtocol):
    """Tells of its end."""

    def __init__(self, server: uvicorn.Server, closed: Callable[[], None]) -> None:
        super().__init__(config=server.config, server_state=server.server_state, app_state={})
        self._tell_closed = closed

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._tell_closed()
