"""HTTP/1.1 to one engine: kept-alive connections, whole answers or their parts as they come.

Every model call passes here, so it does what an engine on the same network needs and no more: no redirects, cookies,
proxies or compression. It costs a fraction of the CPU time of general clients (docs/LOG.md). Closing the reader of an
answer, or cancelling the task that waits for it, closes the connection: the server then stops sampling.

A server may close a kept-alive connection at the moment at which it is used again; if not one byte of an answer has
come, the request is sent once more on a new connection.

An answer may take as long as it likes, but a server that hangs is no server: when all that is waited for has been
silent for QUIET_S, its health is asked for on a connection of its own, and after MAX_FAILED checks without an answer
every exchange fails. A server that is paused is silent and healthy.

Concurrency: one event loop; a connection carries one exchange at a time.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from ssl import create_default_context
from typing import cast
from urllib.parse import urlsplit

import httptools

from manege.errors import EngineAwayError, EngineError

__all__ = ["HttpClient"]

CONNECT_S = 10.0
"""An engine on the same network that does not answer a connection for so long is down."""
QUIET_S = 5.0
"""Between the last byte of a server that is waited for and the first look at its health, and from then on."""
CHECK_S = 5.0
"""For the answer to such a look."""
AGAIN_S = 1.0
"""Between a look that failed and the next."""
MAX_FAILED = 2
"""Looks in a row that fail: a server that hangs is given up after 16 s."""
_HEALTH = "/health"
"""Of vLLM and our own server; one that has no such path says so, and lives."""
_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})


class HttpClient:
    """Requests to one origin. Every method raises EngineAwayError when it cannot be reached, hangs or breaks off."""

    def __init__(self, url: str, *, lost: Callable[[], None] = lambda: None, health: str = _HEALTH) -> None:
        """`url`: root of the server, without a path. `lost` is called when the server has closed a connection: it may
        be another one by now. `health`: a path that it answers as long as it lives, also while it is paused."""
        self.url = url
        self._lost, self._health = lost, health
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._closed = False
        self._watching: asyncio.Task[None] | None = None

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of an answer."""
        connection = await self._send(method, path, body)
        try:
            return connection.status, await connection.rest()
        finally:
            self._release(connection)

    async def stream(self, path: str, body: bytes) -> tuple[int, AsyncGenerator[bytes, None]]:
        """POST: the status, once it is there, and the body in parts, which must be read to their end or closed."""
        connection = await self._send("POST", path, body)
        return connection.status, self._parts(connection)

    async def close(self) -> None:
        """End every exchange with EngineError."""
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
        self._fail("was left: its client was closed during a request")

    async def _send(self, method: str, path: str, body: bytes) -> "_Connection":
        """A connection on which the head of the answer has come."""
        if self._closed:
            raise EngineError(f"the client of the engine at {self.url} is closed; make a new one")
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            was_used = connection.was_used
            self._watch()
            try:
                connection.send(self._head(method, path, len(body)) + body)
                await connection.head()
                return connection
            except EngineError:
                is_stale = was_used and not (connection.has_answered or connection.was_left)
                self._release(connection)
                if not is_stale:
                    raise
            except BaseException:
                self._release(connection)
                raise

    async def _parts(self, connection: "_Connection") -> AsyncGenerator[bytes, None]:
        try:
            while part := await connection.part():
                yield part
        finally:
            self._release(connection)

    def _watch(self) -> None:
        """See that the server lives as long as something is waited for."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._check_until_idle(), name="engine-health")

    async def _check_until_idle(self) -> None:
        loop = asyncio.get_running_loop()
        healthy_s, num_failed = 0.0, 0
        while busy := [each for each in self._open if each not in self._idle and not each.was_left]:
            quiet_s = loop.time() - max(healthy_s, *(each.heard_s for each in busy))
            if quiet_s < QUIET_S:
                num_failed = 0
                await asyncio.sleep(QUIET_S - quiet_s)
            elif await self._is_healthy():
                healthy_s = loop.time()
            elif (num_failed := num_failed + 1) == MAX_FAILED:
                self._fail(f"hangs: nothing came for {quiet_s:.0f} s, nor an answer about its health; see its log")
            else:
                await asyncio.sleep(AGAIN_S)

    async def _is_healthy(self) -> bool:
        """Whether it answers at all, on a new connection."""
        try:
            async with asyncio.timeout(CHECK_S):
                connection = await self._connect()
                try:
                    connection.send(self._head("GET", self._health, 0))
                    await connection.head()
                    return connection.status < 500
                finally:
                    connection.close()
        except (EngineError, TimeoutError):
            return False

    def _fail(self, reason: str) -> None:
        for connection in list(self._open):
            connection.close(reason)

    async def _connect(self) -> "_Connection":
        parts = urlsplit(self.url)
        try:
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise OSError("its address must begin with http:// or https://")
            secure = create_default_context() if parts.scheme == "https" else None
            port = parts.port or (443 if secure else 80)
            async with asyncio.timeout(CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self), parts.hostname, port, ssl=secure
                )
        except (OSError, ValueError) as error:
            raise EngineAwayError(f"the engine at {self.url} cannot be reached: {error}; is it running?") from error
        self._open.add(connection)
        return connection

    def _head(self, method: str, path: str, length: int) -> bytes:
        host = urlsplit(self.url).netloc.rpartition("@")[2]
        return (
            f"{method} {path} HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\n"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        ).encode()

    def _release(self, connection: "_Connection") -> None:
        if connection.is_reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()

    def forget(self, connection: "_Connection") -> None:
        """It was closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if not connection.was_left:
            self._lost()


class _Connection(asyncio.Protocol):
    """One connection; also the receiver of its parser's callbacks."""

    def __init__(self, owner: HttpClient) -> None:
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._error: str | None = None
        self.was_used = False
        self.was_left = False
        """Whether it was closed from here."""
        self.heard_s = 0.0
        """When something was last sent or came, on the event loop's clock."""
        self._start()

    def _start(self) -> None:
        self.status = 0
        self.has_answered = False
        self._has_length = False
        self._is_complete = self._keeps_alive = False

    @property
    def is_reusable(self) -> bool:
        """Whether another exchange can follow."""
        return self._is_complete and self._error is None and self._keeps_alive

    def send(self, data: bytes) -> None:
        self._start()
        self.was_used = True
        self.heard_s = asyncio.get_running_loop().time()
        assert self._transport is not None
        self._transport.write(data)

    async def head(self) -> None:
        """Return when the status is there."""
        while not self.status:
            await self._more()

    async def rest(self) -> bytes:
        """The whole body."""
        while not self._is_complete:
            await self._more()
        body = b"".join(self._parts)
        self._parts.clear()
        return body

    async def part(self) -> bytes:
        """What has come of the body; empty at its end."""
        while not self._parts and not self._is_complete:
            await self._more()
        body = b"".join(self._parts)
        self._parts.clear()
        return body

    def close(self, reason: str | None = None) -> None:
        self._error = self._error or reason
        self.was_left = True
        if self._transport is not None:
            self._transport.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise EngineAwayError(f"the engine at {self._owner.url} {self._error}")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.has_answered = True
        self.heard_s = asyncio.get_running_loop().time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close(f"does not speak HTTP: {error}")
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.status and not self._has_length and self._error is None:
            self._is_complete = True
        self._error = self._error or "closed the connection before its answer was complete"
        self._owner.forget(self)
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length = self._has_length or name.lower() in _LENGTHS

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        # What the parser says of it is gone after this callback.
        self._keeps_alive = self._parser.should_keep_alive()
        self._is_complete = self.status >= 200
