"""Serves an application on a socket, inside the caller's event loop; signals stay with the caller.

Stopping lets answers in flight go out for a moment; the gateway's server ends long polls and held calls first.
"""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self

import uvicorn
from starlette.applications import Starlette

from manege.errors import ConfigError
from manege.gateway.given import Given
from manege.gateway.services import Services
from manege.listening import BACKLOG
from manege.logs import get_logger, kv

__all__ = ["LOOPBACK", "GatewayServer", "Server", "bound", "check_host", "url_of"]

GRACE_S = 3
"""How long answers in flight may take at shutdown; then their connections are closed."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")

_log = get_logger("gateway")


class Server:
    """`async with Server(app) as server: ... server.url`."""

    def __init__(
        self, app: Starlette, *, host: str = "127.0.0.1", port: int = 0, has_explicit_key: bool = False
    ) -> None:
        """Raises ConfigError for another address than loopback without a key that the operator chose."""
        check_host(host, has_explicit_key=has_explicit_key)
        self.app = app
        self._host, self._port = host, port
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=120,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it listens; the port is real after `start`."""
        return url_of(self._host, self._port)

    async def start(self) -> None:
        """Return when requests are accepted. Raises ConfigError when the port is in use."""
        self._serving = asyncio.create_task(self._uvicorn.serve(self._listeners()), name="gateway-server")
        while not self._uvicorn.started:
            if self._serving.done():
                await self._serving
                raise ConfigError(f"nothing started on {self.url}; the log says why")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Safe to repeat."""
        if self._serving is not None:
            self._uvicorn.should_exit = True
            await self._serving

    async def wait(self) -> None:
        """Return when the server has ended."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _listeners(self) -> list[socket.socket]:
        listener = bound(self._host, self._port)
        self._port = listener.getsockname()[1]
        return [listener]


class GatewayServer(Server):
    """Serves what `create_app` made; with `given`, what another process accepts, and nothing by itself."""

    _tasks: Sequence[asyncio.Task[None]] = ()

    def __init__(
        self,
        app: Starlette,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        has_explicit_key: bool = False,
        given: Given | None = None,
    ) -> None:
        super().__init__(app, host=host, port=port, has_explicit_key=has_explicit_key)
        self._given = given

    @property
    def url(self) -> str:
        return self._given.post.url if self._given else super().url

    @property
    def services(self) -> Services:
        """The parts of the gateway."""
        return self.app.state.services

    async def start(self) -> None:
        """As the store says: with the engines that were registered, and paused if it was. Raises ConfigError when the
        other gateways of its database have another operator key."""
        services = self.services
        await services.presence.begin()
        try:
            await services.auth.agree(is_alone=not await services.presence.others())
            await services.engine.follow()
            await services.pauses.restore()
            if self._given is None:
                services.handed.open()
            else:
                services.handed.share(self._given.post.door)
            await super().start()
        except BaseException:
            services.handed.close()
            await services.presence.end()
            raise
        tasks = [
            asyncio.create_task(services.presence.run(), name="signs-of-life"),
            asyncio.create_task(self.app.state.following.run(), name="following"),
            asyncio.create_task(services.handed.run(self.app, self._uvicorn), name="handed-sockets"),
        ]
        if (given := self._given) is not None:
            knock = partial(services.handed.knock, closed=given.closed)
            serving = given.run(self._uvicorn, knock, self._lost_elsewhere)
            tasks.append(asyncio.create_task(serving, name="given-connections"))
        self._tasks = tasks
        for task in tasks:
            task.add_done_callback(_report)

    async def stop(self) -> None:
        """Safe to repeat."""
        services = self.services
        if self._given is not None:
            await self._given.close()
        services.feed.close()
        services.gate.close()
        await super().stop()
        await services.flights.close()
        tasks, self._tasks = self._tasks, ()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            await services.presence.end()
        services.handed.close()
        await services.engine.close()

    def _lost_elsewhere(self) -> None:
        """Another worker ended: what it was about to answer may be in no log."""
        self.services.flights.recorded_since_s = self.services.clock()

    def _listeners(self) -> list[socket.socket]:
        return [] if self._given else super()._listeners()


def check_host(host: str, *, has_explicit_key: bool) -> None:
    """Raises ConfigError for another address than loopback without a key that the operator chose."""
    if host not in LOOPBACK and not has_explicit_key:
        raise ConfigError(
            f"host {host!r} can be reached from outside; choose a key for it (gateway.key), or bind 127.0.0.1"
        )


def url_of(host: str, port: int) -> str:
    """Where a server is found."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError when it cannot."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; "
            "end what uses the port, or choose another (gateway.port; 0: a free one)"
        ) from error
    # asyncio leaves it unset on sockets of `create_server`; an answer then waits 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (bug := task.exception()):
        _log.error(
            kv("a gateway that no longer knows of the others must be restarted", task=task.get_name()), exc_info=bug
        )


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
