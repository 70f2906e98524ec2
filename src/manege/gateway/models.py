"""Routes of the engine registry, in Agent Lightning's shapes; what they do is in `pool.py`."""

from collections.abc import Sequence

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manege.gateway.declare import answers, asks, takes
from manege.gateway.pool import Registration
from manege.gateway.services import Services
from manege.http import answer

__all__ = ["model_routes"]


def model_routes(services: Services) -> list[Route]:
    """All of them need the operator key."""
    handlers, operator = _Models(services), services.auth.operator
    return [
        Route("/api/models", operator(handlers.register), methods=["POST"]),
        Route("/api/models", operator(handlers.list), methods=["GET"]),
        Route("/api/models", operator(handlers.clear), methods=["DELETE"]),
    ]


class _Which(BaseModel):
    endpoint: str | None = None
    """Of one engine; None: all."""


class _Models:
    def __init__(self, services: Services) -> None:
        self._engine = services.engine

    @takes(list[Registration])
    @answers(201)
    async def register(self, _request: Request, added: Sequence[Registration]) -> Response:
        """Serve model calls by these engines (`model`, `endpoint`, `version`, `mode`, `wire`), from now on; each is
        tried first."""
        await self._engine.register(added)
        return answer(added, 201)

    async def list(self, _request: Request) -> Response:
        """The engines that were registered."""
        return answer(self._engine.registrations)

    @asks(_Which)
    async def clear(self, _request: Request, which: _Which) -> Response:
        """Forget them, or the one at `endpoint`, when their calls have ended; without any, the gateway's own engine
        serves again. Of the one, `running` tells the calls that it still answers for this gateway: it may be stopped
        when there are none, so ask again."""
        if which.endpoint is None:
            await self._engine.clear()
            return answer({"status": "ok"})
        return answer({"status": "ok", "running": await self._engine.forget(which.endpoint)})
