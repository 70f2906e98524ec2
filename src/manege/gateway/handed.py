"""Listening sockets that controllers of this machine hand over: each is the gateway of one attempt, inside its sandbox.

The door is a Unix socket with an abstract name, which only processes in our network namespace reach: sandboxed agents
do not, nor do controllers elsewhere (they relay). A controller connects, sends the attempt's key and the listening
socket in one message, and is answered OK, or why not. From then on what comes in on that socket counts as sent with
that key, so that everything the key is refused stays refused, whatever key the agent sends. The end of the Unix
connection, also by the controller's death, is the end of that: answers in flight still go out.
"""

import asyncio
import os
import secrets
import socket
import sys
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp

from manege.errors import ManegeError, ProtocolError
from manege.gateway.auth import Auth
from manege.listening import BACKLOG, Keyed, listening
from manege.logs import get_logger, kv

__all__ = ["Handed"]

OK = b"ok"
MAX_MESSAGE_BYTES = 4096
"""Of a key."""
RETRY_S = 1.0
"""After the door could not accept: open files are used up."""

_log = get_logger("gateway")


class Handed:
    """Of one gateway: `open`, then `run` until cancelled."""

    def __init__(self, auth: Auth) -> None:
        self._auth = auth
        self._socket: socket.socket | None = None
        self.door: str | None = None
        """Its abstract name, without the zero byte before it; None: it is not open, or there are none here (Linux)."""

    def open(self) -> None:
        """Make the door; who connects waits for `run`."""
        if sys.platform != "linux":
            return
        name = f"manege-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{name}")
        self._socket.listen(BACKLOG)
        self.door = name

    def close(self) -> None:
        """Nobody comes in any more. Safe to repeat."""
        self.door = None
        if self._socket is not None:
            self._socket.close()

    async def run(self, app: ASGIApp, server: uvicorn.Server) -> None:
        """Take in sockets for an application whose server runs; cancelled, let them all go."""
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._socket)
                except OSError as error:
                    _log.warning(kv("no listening socket can be taken in", reason=error))
                    await asyncio.sleep(RETRY_S)
                    continue
                group.create_task(self._adopt(connection, app, server), name="handed-socket")

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
    await _readable(connection)
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


async def _readable(connection: socket.socket) -> None:
    """Return when something has come; event loops have no call that receives descriptors."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(connection)
