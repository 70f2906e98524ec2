"""Routes of controllers: claim attempts under a lease (long poll), prolong the leases."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manege.client import Claim
from manege.gateway.declare import takes
from manege.gateway.services import Services
from manege.http import answer
from manege.types import Rollout, RolloutId

__all__ = ["lease_routes"]

Controller = Annotated[str, Field(min_length=1, max_length=200)]
LeaseSeconds = Annotated[float, Field(gt=0, le=86400)]


class _ClaimBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    controller: Controller
    limit: Annotated[int, Field(ge=1, le=1000)]
    lease_s: LeaseSeconds
    wait_s: Annotated[float, Field(ge=0, le=300)] = 0
    holding: list[RolloutId] | None = None


class _HeldBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    controller: Controller
    lease_s: LeaseSeconds


class _RenewBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    controller: Controller
    rollout_ids: list[RolloutId]
    lease_s: Annotated[float, Field(ge=0, le=86400)]


def lease_routes(services: Services) -> list[Route]:
    """All of them need the operator key."""
    handlers, operator = _Leases(services), services.auth.operator
    return [
        Route("/api/leases", operator(handlers.claim), methods=["POST"]),
        Route("/api/leases/held", operator(handlers.held), methods=["POST"]),
        Route("/api/leases/renew", operator(handlers.renew), methods=["POST"]),
    ]


class _Leases:
    def __init__(self, services: Services) -> None:
        self._services = services

    @takes(_ClaimBody)
    async def claim(self, request: Request, body: _ClaimBody) -> Response:
        """Take queued rollouts under a lease, with the keys of their agents; waits up to `wait_s` for work. What the
        controller had before and is not `holding` was lost: it gets another attempt."""

        async def read() -> list[Claim]:
            if self._services.feed.is_closed:
                return []  # An agent that began now would lose its gateway.
            taken = await self._services.store.claim(
                controller=body.controller, limit=body.limit, lease_s=body.lease_s, holding=body.holding
            )
            return [self._claim_of(rollout) for rollout in taken]

        return answer(await self._services.feed.poll(request, body.wait_s, read, []))

    @takes(_HeldBody)
    async def held(self, _request: Request, body: _HeldBody) -> Response:
        """What a controller of this name had, for one whose attempts go on without it; its leases begin anew."""
        found = await self._services.store.held(controller=body.controller, lease_s=body.lease_s)
        return answer([self._claim_of(rollout) for rollout in found])

    @takes(_RenewBody)
    async def renew(self, _request: Request, body: _RenewBody) -> Response:
        """Prolong leases, or give them up with `lease_s` 0; answers which of them are lost."""
        lost = await self._services.store.renew(
            controller=body.controller, rollout_ids=body.rollout_ids, lease_s=body.lease_s
        )
        return answer({"lost": lost})

    def _claim_of(self, rollout: Rollout) -> Claim:
        auth, attempt = self._services.auth, (rollout.spec.id, rollout.attempt)
        return Claim(rollout=rollout, agent_key=auth.agent_key(*attempt), scorer_key=auth.scorer_key(*attempt))
