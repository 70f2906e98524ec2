"""The way of agents to the services of their run: a request goes on as it is, its answer comes back as it comes.

The address is that of the run's stored config, so it holds wherever the gateway is. An agent is known by its key or its
socket, as for model calls; its key goes no further. A service that cannot be connected to may be starting again: the
request waits, up to the service's `timeout_s`, since nothing of it was taken.
"""

import asyncio
from contextlib import aclosing

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from manege.config import ServiceConfig
from manege.errors import NotFoundError, ServiceError
from manege.gateway.auth import AgentIdentity
from manege.gateway.declare import answers
from manege.gateway.services import Services
from manege.http import HOP_HEADERS, ClientGone, Connection, read_raw
from manege.listening import KEY_HEADERS
from manege.logs import get_logger, kv

__all__ = ["tool_routes"]

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""As much as a request may have by default; no tool of an agent needs more, and endless answers end."""
RETRY_S = 0.5
_METHODS = ["DELETE", "GET", "PATCH", "POST", "PUT"]

_log = get_logger("gateway")


def tool_routes(services: Services) -> list[Route]:
    """They need an agent's key."""
    ask = services.auth.agent(_Tools(services).ask, late="late.call")
    return [Route("/proxy/services/{service}/{path:path}", ask, methods=_METHODS)]


class _Tools:
    def __init__(self, services: Services) -> None:
        self._services = services
        # No connection is kept, so that there is nothing to close. Proxies of the environment are for the outside.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)

    @answers(200, "*/*")
    async def ask(self, request: Request, identity: AgentIdentity) -> Response:
        """What a service of the run answers to this method, path, query and body."""
        name = request.path_params["service"]
        known = (await self._services.settings.of(identity.rollout.spec.run)).tools
        if name not in known:
            raise NotFoundError(
                f"the run {identity.rollout.spec.run} has no service {name!r}; it has {', '.join(known) or 'none'}. "
                f"Name it in the run file as [services.{name}]"
            )
        if ".." in request.path_params["path"].split("/"):
            raise NotFoundError(f"the path {request.path_params['path']!r} leaves the service {name}")
        body = await read_raw(request, self._services.max_body_bytes)
        async with Connection(request.receive) as connection:
            response = await connection.run(self._sent(name, known[name], request, body))
        return _Answer(name, response)

    async def _sent(self, name: str, service: ServiceConfig, request: Request, body: bytes) -> httpx.Response:
        """Its answer, of which nothing is read yet. Raises ServiceError."""
        sent = _passed_on(service, request, body)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + service.timeout_s
        while True:
            try:
                return await self._transport.handle_async_request(sent)
            except httpx.TransportError as error:
                was_taken = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if was_taken or loop.time() > deadline_s:
                    raise ServiceError(
                        f"the service {name} at {service.address} did not answer ({type(error).__name__}: {error}); "
                        f"see whether it runs, and its log; services.{name}.timeout_s = {service.timeout_s:g}"
                    ) from error
            await asyncio.sleep(RETRY_S)


def _passed_on(service: ServiceConfig, request: Request, body: bytes) -> httpx.Request:
    url = httpx.URL(service.address)
    query = b"?" + request.scope["query_string"] if request.scope["query_string"] else b""
    # What follows /proxy/services/NAME, as it came.
    path = b"/" + request.scope["raw_path"].split(b"/", 4)[4]
    dropped = HOP_HEADERS | KEY_HEADERS | {b"content-length"}
    return httpx.Request(
        request.method,
        url,
        headers=[header for header in request.headers.raw if header[0] not in dropped],
        content=body or None,
        extensions={
            "timeout": httpx.Timeout(service.timeout_s).as_dict(),
            "target": url.raw_path.rstrip(b"/") + path + query,
        },
    )


class _Answer(Response):
    """One that breaks off, or does not end, breaks the caller's connection."""

    def __init__(self, name: str, response: httpx.Response) -> None:
        self._name, self._response = name, response
        self.status_code, self.background = response.status_code, None
        self.raw_headers = [header for header in response.headers.raw if header[0].lower() not in HOP_HEADERS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._response), Connection(receive) as connection:
            try:
                await connection.run(self._stream(send))
            except ClientGone:
                pass
            except httpx.TransportError as error:
                _log.warning(kv("a service broke off", service=self._name, reason=error))

    async def _stream(self, send: Send) -> None:
        num_bytes = 0
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._response.aiter_raw():
            num_bytes += len(part)
            if num_bytes > MAX_ANSWER_BYTES:
                _log.warning(kv("an answer is cut off", service=self._name, after_bytes=MAX_ANSWER_BYTES))
                return
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
