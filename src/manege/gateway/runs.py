"""Routes of runs: their config, which controllers read."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manege.gateway.declare import takes
from manege.gateway.services import Services
from manege.http import answer
from manege.types import RunId

__all__ = ["run_routes"]


class _RunBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any]


def run_routes(services: Services) -> list[Route]:
    """All of them need the operator key."""
    handlers, operator = _Runs(services), services.auth.operator
    return [
        Route("/api/runs/{run_id}", operator(handlers.put), methods=["PUT"]),
        Route("/api/runs/{run_id}", operator(handlers.get), methods=["GET"]),
    ]


class _Runs:
    def __init__(self, services: Services) -> None:
        self._services = services

    @takes(_RunBody)
    async def put(self, request: Request, body: _RunBody) -> Response:
        """Create a run or replace its config."""
        run_id = RunId(request.path_params["run_id"])
        return answer(await self._services.store.put_run(run_id, body.config))

    async def get(self, request: Request) -> Response:
        """A run and its config."""
        return answer(await self._services.store.get_run(RunId(request.path_params["run_id"])))
