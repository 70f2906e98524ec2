"""An application on a listening socket that was handed over, beside or without a running server.

In: a listening socket that somebody else made, perhaps in another network namespace, and the key that every request on
it shall have. Out: its connections are answered while the context lasts. Who asks is thus known by the socket: what a
caller sends as its key is never looked at.
"""

import asyncio
import copy
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

__all__ = ["BACKLOG", "KEY_HEADERS", "Keyed", "listening", "readable"]

BACKLOG = 2048
"""Connections that wait to be accepted."""

KEY_HEADERS = frozenset({b"authorization", b"proxy-authorization", b"x-api-key", b"x-goog-api-key", b"api-key"})
"""Headers in which clients send keys. One in the query (`?key=`) stays: it counts less than our header."""


class Keyed:
    """An application whose requests all have one key, whatever their callers sent."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._header = (b"authorization", b"Bearer " + key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [self._header, *(header for header in scope["headers"] if header[0] not in KEY_HEADERS)]
        await self._app({**scope, "headers": headers}, receive, send)


@asynccontextmanager
async def listening(
    listener: socket.socket, app: ASGIApp, *, config: uvicorn.Config, state: ServerState
) -> AsyncIterator[asyncio.Server]:
    """Serve `app` on `listener`, which is closed at the end; answers in flight still go out. `config` is loaded; its
    own application is not used. `state` may be that of a running server, which then waits for these answers, too."""
    config = copy.copy(config)
    config.loaded_app = app

    def connected() -> HttpToolsProtocol:
        return HttpToolsProtocol(config=config, server_state=state, app_state={})

    listener.setblocking(False)
    # Inherited by its connections; asyncio leaves it unset, and an answer then waits 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = await asyncio.get_running_loop().create_server(connected, sock=listener, backlog=BACKLOG)
    try:
        yield server
    finally:
        server.close()
        for connection in state.connections.copy():
            if isinstance(connection, HttpToolsProtocol) and connection.app is app:
                connection.shutdown()


async def readable(connection: socket.socket) -> None:
    """Return when something has come; event loops have no call that receives descriptors."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(connection)
