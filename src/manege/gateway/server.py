"""Serves an application on a socket, inside the caller's event loop; signals stay with the caller.

Stopping lets answers in flight go out for a moment; the gateway's server ends long polls and held calls first.
"""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import uvicorn
from starlette.applications import Starlette

from manege.errors import ConfigError
from manege.gateway.services import Services
from manege.listening import BACKLOG
from manege.logs import get_logger, kv

__all__ = ["LOOPBACK", "GatewayServer", "Server"]

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
        if host not in LOOPBACK and not has_explicit_key:
            raise ConfigError(
                f"host {host!r} can be reached from outside; choose a key for it (gateway.key), or bind 127.0.0.1"
            )
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
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def start(self) -> None:
        """Return when requests are accepted. Raises ConfigError when the port is in use."""
        listener = self._bind()
        self._port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._uvicorn.serve([listener]), name="gateway-server")
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

    def _bind(self) -> socket.socket:
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, self._port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._host} port {self._port}: {error.strerror}; "
                "end what uses the port, or choose another (gateway.port; 0: a free one)"
            ) from error
        # asyncio leaves it unset on sockets of `create_server`; an answer then waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener


class GatewayServer(Server):
    """Serves what `create_app` made."""

    _tasks: Sequence[asyncio.Task[None]] = ()

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
            services.handed.open()
            await super().start()
        except BaseException:
            services.handed.close()
            await services.presence.end()
            raise
        self._tasks = [
            asyncio.create_task(services.presence.run(), name="signs-of-life"),
            asyncio.create_task(self.app.state.following.run(), name="following"),
            asyncio.create_task(services.handed.run(self.app, self._uvicorn), name="handed-sockets"),
        ]
        for task in self._tasks:
            task.add_done_callback(_report)

    async def stop(self) -> None:
        """Safe to repeat."""
        services = self.services
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


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (bug := task.exception()):
        _log.error(
            kv("a gateway that no longer knows of the others must be restarted", task=task.get_name()), exc_info=bug
        )


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
