"""Answers a listening socket with what a gateway elsewhere answers: HTTP in, HTTP out, both ways as it comes.

Every request goes on with the attempt's key in place of whatever key it had. A caller that goes away ends its request
at the gateway, a gateway that breaks off breaks the caller's connection. While the gateway cannot be connected to,
requests wait; those that it never got, or did not begin to answer, are answered with 503, which SDKs try again.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing

import httpx
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from manege.client import Client
from manege.errors import UnavailableError
from manege.http import HOP_HEADERS, ClientGone, Connection, answer
from manege.listening import Keyed, listening
from manege.logs import get_logger, kv

__all__ = ["relay"]

PATIENCE_S = 60.0
"""For a gateway that cannot be connected to."""
RETRY_S = 0.5
CONNECT_S = 10.0
KEEP_ALIVE_S = 120
"""As the gateway does."""

_log = get_logger("controller")


async def relay(listener: socket.socket, client: Client, key: str) -> None:
    """Until cancelled; `listener` stays open."""
    app = Keyed(_Relay(client), key)
    config = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="off", log_config=None, timeout_keep_alive=KEEP_ALIVE_S
    )
    config.load()
    state = ServerState()
    try:
        async with listening(listener.dup(), app, config=config, state=state):
            await asyncio.get_running_loop().create_future()
    finally:
        for connection in state.connections.copy():
            assert connection.transport is not None
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks)


class _Relay:
    """An ASGI application."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        upload = _Upload(scope, receive)
        try:
            async with Connection(upload.after) as connection:
                await connection.run(self._pass_on(scope, upload, send))
        except (ClientGone, ClientDisconnect):
            pass

    async def _pass_on(self, scope: Scope, upload: "_Upload", send: Send) -> None:
        try:
            response = await self._ask(self._request(scope, upload))
        except httpx.TransportError as error:
            reason = f"the gateway at {self._client.url} cannot be reached ({type(error).__name__}: {error})"
            _log.warning(reason)
            gone = UnavailableError(f"{reason}; try again")
            body = {"error": {"code": gone.code, "message": str(gone), "status": gone.status}}
            await answer(body, gone.status)(scope, upload.after, send)
            return
        async with aclosing(response):
            headers = [header for header in response.headers.raw if header[0].lower() not in HOP_HEADERS]
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            try:
                async for part in response.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except httpx.TransportError as error:
                # An answer that is not completed has its connection closed.
                _log.warning(kv("the gateway broke off", gateway=self._client.url, reason=error))
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _request(self, scope: Scope, upload: "_Upload") -> httpx.Request:
        url = httpx.URL(self._client.url)
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        return httpx.Request(
            scope["method"],
            url,
            headers=[header for header in scope["headers"] if header[0] not in HOP_HEADERS],
            content=upload.parts() if upload.has_body else None,
            extensions={
                "timeout": httpx.Timeout(None, connect=CONNECT_S).as_dict(),
                # As it came: a path that looks like an address must not become one.
                "target": url.raw_path.rstrip(b"/") + scope["raw_path"] + query,
            },
        )

    async def _ask(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.TransportError."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + PATIENCE_S
        while True:
            try:
                return await self._client.forward(request)
            except (httpx.ConnectError, httpx.ConnectTimeout):  # nothing of its body was taken
                if loop.time() > deadline_s:
                    raise
            await asyncio.sleep(RETRY_S)


class _Upload:
    """The body of a request, and the caller after it."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name for name, _ in scope["headers"]}
        self.has_body = bool(names & {b"content-length", b"transfer-encoding"})
        self._request = Request(scope, receive)
        self._receive = receive
        self._passed = asyncio.Event()
        if not self.has_body:
            self._passed.set()

    async def parts(self) -> AsyncIterator[bytes]:
        """As they come. Raises ClientDisconnect."""
        async for part in self._request.stream():
            if part:
                yield part
        self._passed.set()

    async def after(self) -> Message:
        """What is received when the body has been passed on."""
        await self._passed.wait()
        return await self._receive()
