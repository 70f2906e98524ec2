"""Routes of the engine registry, in Agent Lightning's shapes; what they do is in `pool.py`."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manege.gateway.declare import answers, takes
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


class _Models:
    def __init__(self, services: Services) -> None:
        self._engine = services.engine

    @takes(list[Registration])
    @answers(201)
    async def register(self, _request: Request, added: Sequence[Registration]) -> Response:
        """Serve model calls by these engines (`model`, `endpoint`, `version`), from now on; each is tried first."""
        await self._engine.register(added)
        return answer(added, 201)

    async def list(self, _request: Request) -> Response:
        """The engines that were registered."""
        return answer(self._engine.registrations)

    async def clear(self, _request: Request) -> Response:
        """Forget them when their calls have ended; the gateway's own engine serves again."""
        await self._engine.clear()
        return answer({"status": "ok"})
