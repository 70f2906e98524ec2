"""A proxy in front of the API server that does to requests what a test wants: the next so many that match fail, wait,
lose their answer, or are cut; and the whole server can seem to be away. Everything else is passed through unchanged,
watches line by line. Plain HTTP on loopback, so it serves clients that were given its URL.
"""

import asyncio
import json
import re
from dataclasses import dataclass, field

import h11
import httpx

_REASONS = {
    403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired", 422: "Invalid", 429: "TooManyRequests",
    500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout",
}  # fmt: skip
_HOP_BY_HOP = {b"connection", b"transfer-encoding", b"content-length", b"keep-alive", b"host", b"content-encoding"}


@dataclass(kw_only=True)
class Fault:
    """What happens to the next `times` requests with this method whose path and query match the pattern."""

    method: str
    path: str
    times: int = 1
    status: int | None = None
    """Answered by the proxy; the server never hears of the request, unless `carried_out`."""
    reason: str | None = None
    """Of the status; None: what Kubernetes says with it, 409 being Conflict (or AlreadyExists, said here)."""
    retry_after_s: int | None = None
    delay_s: float = 0
    """Passed before anything else happens."""
    carried_out: bool = False
    """The server does it, and only the answer is lost."""
    is_reset: bool = False
    """The connection is cut instead of an answer."""
    cut_after: int | None = None
    """A stream is closed after so many lines."""
    stream_error: int | None = None
    """The stream is one line that says this code, and ends: how a watch learns that its version is too old."""
    met: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once no request is left to fail."""

    def takes(self, method, target):
        """Whether this request is one of them; it is then counted."""
        if self.times <= 0 or method != self.method or re.search(self.path, target) is None:
            return False
        self.times -= 1
        return True

    def settle(self):
        """After a request was dealt with."""
        if self.times == 0:
            self.met.set()


class FaultyProxy:
    """`async with FaultyProxy(cluster) as proxy: ... proxy.url`."""

    def __init__(self, cluster):
        self._upstream = httpx.AsyncClient(
            base_url=cluster.url,
            verify=cluster.tls(),
            trust_env=False,
            timeout=httpx.Timeout(30, read=None),
            limits=httpx.Limits(max_connections=None),
        )
        self._faults = []
        self._open = {}
        self._server = None
        self.port = 0
        self.requests = []
        """Method, path with query, and status of each request, in the order of their answers; 0: none was given."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self):
        await self.up()
        return self

    async def __aexit__(self, *_):
        await self.down()
        await self._upstream.aclose()

    async def up(self):
        """Accept connections, on the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def down(self):
        """The API server is away: connections are refused, those that are open are cut."""
        if self._server is not None:
            self._server.close()
            # Connections that were accepted just now have not begun to be served, and could not be cut.
            await asyncio.sleep(0.05)
            await self.cut()
            self._server = None

    async def cut(self):
        """Close all connections, watches too; new ones are accepted."""
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def inject(self, method, path, **what):
        """Arm a fault (see `Fault`); the first armed one that matches a request is it."""
        fault = Fault(method=method, path=path, **what)
        self._faults.append(fault)
        return fault

    async def _serve(self, reader, writer):
        task = asyncio.current_task()
        self._open[task] = writer
        try:
            await _Exchange(self, reader, writer).run()
        except (ConnectionError, h11.RemoteProtocolError):  # the client went away
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            del self._open[task]
            writer.close()

    def _fault(self, method, target):
        return next((fault for fault in self._faults if fault.takes(method, target)), None)


class _Exchange:
    """The requests of one connection."""

    def __init__(self, proxy, reader, writer):
        self._proxy, self._reader, self._writer = proxy, reader, writer
        self._wire = h11.Connection(h11.SERVER)

    async def run(self):
        while (request := await self._event()) is not h11.ConnectionClosed and isinstance(request, h11.Request):
            body = bytearray()
            while isinstance(part := await self._event(), h11.Data):
                body += part.data
            method, target = request.method.decode(), request.target.decode()
            fault = self._proxy._fault(method, target)
            status = 0
            try:
                status = await self._answer(request, method, target, bytes(body), fault)
            finally:
                self._proxy.requests.append((method, target, status))
                if fault is not None:
                    fault.settle()
            if status == 0 or self._wire.our_state is not h11.DONE or self._wire.their_state is not h11.DONE:
                return
            self._wire.start_next_cycle()

    async def _event(self):
        while (event := self._wire.next_event()) is h11.NEED_DATA:
            self._wire.receive_data(await self._reader.read(65536))
        return event

    async def _send(self, *events):
        for event in events:
            self._writer.write(self._wire.send(event) or b"")
        await self._writer.drain()

    async def _answer(self, request, method, target, body, fault):
        """Returns the status that the client saw."""
        if fault is not None:
            await asyncio.sleep(fault.delay_s)
            if fault.carried_out:
                await self._proxy._upstream.send(self._forwarded(request, method, target, body))
            if fault.is_reset:
                self._writer.transport.abort()
                return 0
            if fault.status is not None:
                return await self._refuse(fault)
            if fault.stream_error is not None:
                line = {"type": "ERROR", "object": _status(fault.stream_error, None)}
                await self._whole(200, json.dumps(line).encode() + b"\n", [])
                return 200
        return await self._pass_on(self._forwarded(request, method, target, body), fault)

    async def _refuse(self, fault):
        after = [] if fault.retry_after_s is None else [(b"Retry-After", str(fault.retry_after_s).encode())]
        await self._whole(fault.status, json.dumps(_status(fault.status, fault.reason)).encode(), after)
        return fault.status

    async def _whole(self, status, body, headers):
        headers = [(b"Content-Type", b"application/json"), (b"Content-Length", str(len(body)).encode()), *headers]
        await self._send(h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())

    def _forwarded(self, request, method, target, body):
        headers = [(name, value) for name, value in request.headers if name not in _HOP_BY_HOP]
        return self._proxy._upstream.build_request(method, target, headers=headers, content=body)

    async def _pass_on(self, request, fault):
        left = None if fault is None else fault.cut_after
        request.headers["Accept-Encoding"] = "identity"
        try:
            answer = await self._proxy._upstream.send(request, stream=True)
        except httpx.TransportError:  # the server is being restarted
            return 0
        try:
            headers = [(name, value) for name, value in answer.headers.raw if name.lower() not in _HOP_BY_HOP]
            length = answer.headers.get("Content-Length")
            headers.append(
                (b"Transfer-Encoding", b"chunked") if length is None else (b"Content-Length", length.encode())
            )
            await self._send(h11.Response(status_code=answer.status_code, headers=headers))
            async for part in answer.aiter_raw() if left is None else _lines(answer.aiter_raw(), left):
                await self._send(h11.Data(data=part))
            await self._send(h11.EndOfMessage())
        except httpx.TransportError:
            self._writer.transport.abort()
            return 0
        finally:
            await answer.aclose()
        return answer.status_code


async def _lines(parts, count):
    """The first so many lines of a stream, which may be still longer than that."""
    held = b""
    async for part in parts:
        held += part
        while count > 0 and b"\n" in held:
            line, held = held.split(b"\n", 1)
            yield line + b"\n"
            count -= 1
        if count == 0:
            return


def _status(code, reason):
    reason = reason or _REASONS.get(code, "Unknown")
    return {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "reason": reason,
        "message": f"a test wants {code} {reason} here",
    }  # fmt: skip
