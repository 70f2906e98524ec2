"""Routes of the engine registry, in Agent Lightning's shapes; one entry per model and endpoint, kept in the store."""

from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manege.gateway.http import answer, read_json, validated
from manege.gateway.services import Services

__all__ = ["model_routes"]


class _Model(BaseModel):
    model: str
    endpoint: str
    version: int = 0


_MODELS = TypeAdapter(list[_Model])
_KEY = "models"


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
        self._store = services.store

    async def register(self, request: Request) -> Response:
        """Note an inference endpoint."""
        added = [model.model_dump() for model in validated(_MODELS, await read_json(request))]
        known = await self._store.get_value(_KEY) or []
        merged = {(model["model"], model["endpoint"]): model for model in [*known, *added]}
        await self._store.set_value(_KEY, list(merged.values()))
        return answer(added, 201)

    async def list(self, _request: Request) -> Response:
        """Endpoints that were noted."""
        return answer(await self._store.get_value(_KEY) or [])

    async def clear(self, _request: Request) -> Response:
        """Forget them."""
        await self._store.set_value(_KEY, [])
        return answer({"status": "ok"})
