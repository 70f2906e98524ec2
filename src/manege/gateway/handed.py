"""Listening sockets that controllers of this machine hand over: each is the gateway of one attempt, inside its sandbox.

The door is a Unix socket with an abstract name, which only processes in our network namespace reach: sandboxed agents
do not, nor do controllers elsewhere (they relay). A controller connects, sends the attempt's key and the listening
socket in one message, and is answered OK, or why not. From then on what comes in on that socket counts as sent with
that key, so that everything the key is refused stays refused, whatever key the agent sends. The end of the Unix
connection, also by the controller's death, is the end of that: answers in flight still go out.

In a gateway of several processes the first one has the door and gives each who comes to one worker, to which all calls
of the attempt then come. When that worker dies, the controller knocks again, at the same door.
"""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp

from manege.errors import ManegeError, ProtocolError
from manege.gateway.auth import Auth
from manege.listening import BACKLOG, Keyed, listening, readable
from manege.logs import get_logger, kv

__all__ = ["Handed", "open_door"]

OK = b"ok"
MAX_MESSAGE_BYTES = 4096
"""Of a key."""
RETRY_S = 1.0
"""After the door could not accept: open files are used up."""

_log = get_logger("gateway")


class Handed:
    """Of one process: `open` or `share`, then `run` until cancelled."""

    def __init__(self, auth: Auth) -> None:
        self._auth = auth
        self._socket: socket.socket | None = None
        self._given: asyncio.Queue[tuple[socket.socket, Callable[[], None]]] = asyncio.Queue()
        self.door: str | None = None
        """Its abstract name, without the zero byte before it; None: it is not open, or there are none here (Linux)."""

    def open(self) -> None:
        """Make the door; who connects waits for `run`."""
        self._socket, self.door = open_door()

    def share(self, door: str | None) -> None:
        """Another process has the door; who comes in there is given to `knock`."""
        self.door = door

    def knock(self, connection: socket.socket, closed: Callable[[], None]) -> None:
        """Somebody came in at a shared door; `closed` is called at the end of that."""
        self._given.put_nowait((connection, closed))

    def close(self) -> None:
        """Nobody comes in any more. Safe to repeat."""
        self.door = None
        if self._socket is not None:
            self._socket.close()

    async def run(self, app: ASGIApp, server: uvicorn.Server) -> None:
        """Take in sockets for an application whose server runs; cancelled, let them all go."""
        async with asyncio.TaskGroup() as group:
            while True:
                connection, closed = await self._next()
                task = group.create_task(self._adopt(connection, app, server), name="handed-socket")
                task.add_done_callback(lambda _, closed=closed: closed())

    async def _next(self) -> tuple[socket.socket, Callable[[], None]]:
        while self._socket is not None:
            try:
                return (await asyncio.get_running_loop().sock_accept(self._socket))[0], _nothing
            except OSError as error:
                _log.warning(kv("no listening socket can be taken in", reason=error))
                await asyncio.sleep(RETRY_S)
        return await self._given.get()

    async def _adopt(self, connection: socket.socket, app: ASGIApp, server: uvicorn.Server) -> None:
        with connection:
            try:
                key, listener = await _receive(connection)
                with listener:
                    self._auth.attempt_of(key)
                    await _serve(connection, listener, Keyed(app, key), server)
            except ManegeError as error:
                with suppress(OSError):
                    connection.send(str(error).encode())
            except OSError as error:
                _log.info(kv("a controller went away while it handed over a socket", reason=error))


def open_door() -> tuple[socket.socket | None, str | None]:
    """A door and its name; none where there are none. Who connects waits to be accepted."""
    if sys.platform != "linux":
        return None, None
    name = f"manege-{secrets.token_hex(16)}"
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.setblocking(False)
    door.bind(f"\0{name}")
    door.listen(BACKLOG)
    return door, name


def _nothing() -> None:
    pass


async def _serve(connection: socket.socket, listener: socket.socket, app: ASGIApp, server: uvicorn.Server) -> None:
    """Until the controller closes the connection."""
    async with listening(listener, app, config=server.config, state=server.server_state) as adopted:
        # The server stops accepting here, too, when it stops.
        server.servers.append(adopted)
        try:
            connection.send(OK)
            await asyncio.get_running_loop().sock_recv(connection, 1)
        finally:
            server.servers.remove(adopted)


async def _receive(connection: socket.socket) -> tuple[str, socket.socket]:
    """The key and the socket. Raises ProtocolError, OSError."""
    await readable(connection)
    message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
    if not descriptors:
        raise ProtocolError("no socket came with the key; send both in one message")
    try:
        listener = socket.socket(fileno=descriptors[0])
    except OSError as error:
        os.close(descriptors[0])
        raise ProtocolError(f"what came with the key is not a socket: {error}") from error
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise ProtocolError("the socket that came with the key does not listen")
    return message.decode("utf-8", "replace"), listener
