"""Routes that steer the gateway itself: pause, resume, new weights, its state, health and metrics.

`POST /proxy/pause` with `drain_s` answers when the calls in flight have ended and the engine is paused; without it, at
once, and the caller watches `inflight` in `/proxy/state` (Agent Lightning's trainer does). Both mean the calls of all
gateways of the database (`pauses.py`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from manege.engine.base import Weights
from manege.gateway.declare import answers, asks, takes
from manege.gateway.metrics import render
from manege.gateway.services import Services
from manege.gateway.watchdog import ages
from manege.http import RETRY_AFTER_S, answer
from manege.types import RunId

__all__ = ["proxy_routes"]


class _PauseBody(BaseModel):
    drain_s: Annotated[float, Field(ge=0, le=3600)] | None = None
    keep: bool = False
    reason: str | None = None


class _WeightsBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["shared", "folder", "transfer"]
    folder: str | None = None
    address: str | None = None


class _StateQuery(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    run: RunId | None = None
    """Whose rollouts are counted; unset: of all runs."""


_METRICS_TYPE = "text/plain; version=0.0.4"


def proxy_routes(services: Services) -> list[Route]:
    """All but `/healthz` need the operator key."""
    handlers, operator = _Proxy(services), services.auth.operator
    return [
        Route("/proxy/pause", operator(handlers.pause), methods=["POST"]),
        Route("/proxy/resume", operator(handlers.resume), methods=["POST"]),
        Route("/proxy/state", operator(handlers.state), methods=["GET"]),
        Route("/proxy/weights", operator(handlers.publish), methods=["POST"]),
        Route("/metrics", operator(handlers.metrics), methods=["GET"]),
        Route("/healthz", handlers.health, methods=["GET"]),
    ]


class _Proxy:
    def __init__(self, services: Services) -> None:
        self._services = services

    @takes(_PauseBody)
    async def pause(self, _request: Request, body: _PauseBody) -> Response:
        """Hold new model calls; with `drain_s`, answer when those in flight have ended, or that time is over, and the
        engine is paused; what did not end goes on after it, with `keep` over the cache that it has."""
        await self._services.pauses.pause(body.drain_s, body.reason, keep=body.keep)
        return answer(await self._state())

    async def resume(self, _request: Request) -> Response:
        """Let everything go on; harmless when not paused."""
        await self._services.pauses.resume()
        return answer(await self._state())

    @asks(_StateQuery)
    async def state(self, _request: Request, query: _StateQuery) -> Response:
        """Paused or not, calls in flight and held, policy version, how busy the engines are, rollouts per state
        (`?run=` for one run), and how many seconds the oldest thing of each kind has been waiting."""
        counts = await self._services.store.count_rollouts(run=query.run)
        oldest = ages(await self._services.presence.oldest(), self._services.clock())
        rollouts = {str(state): number for state, number in counts.items()}
        return answer({**await self._state(), "rollouts": rollouts, "oldest": oldest})

    @takes(_WeightsBody)
    async def publish(self, _request: Request, body: _WeightsBody) -> Response:
        """Give the engine new weights (`shared`, `folder` or `transfer`) under the next version; only while paused."""
        weights = Weights(kind=body.kind, folder=body.folder, address=body.address)
        return answer({"version": await self._services.pauses.publish(weights)})

    @answers(200, _METRICS_TYPE)
    async def metrics(self, _request: Request) -> Response:
        """Counters and gauges in the text format of Prometheus."""
        store, engine = self._services.store, await self._services.engine.state()
        gauges = {
            "manege_rollouts": await store.count_rollouts(),
            "manege_calls_retried": self._services.engine.num_retried,
            "manege_engines_unhealthy": self._services.engine.num_unhealthy,
            "manege_engine_running": engine.running,
            "manege_engine_waiting": engine.waiting,
            "manege_engine_cache_usage": engine.cache_usage,
            "manege_engine_idle_seconds_total": engine.idle_s,
            "manege_policy_version": await store.policy_version(),
        }
        totals = self._services.totals.of_all(await self._services.presence.others())
        text = render({**totals, **gauges})
        return PlainTextResponse(text, media_type=_METRICS_TYPE)

    async def health(self, _request: Request) -> Response:
        """Whether the gateway serves; needs no key."""
        return answer({"status": "ok"})

    async def _state(self) -> dict[str, Any]:
        gate, pauses = self._services.gate, self._services.pauses
        totals = self._services.totals.of_all(await self._services.presence.others())
        return {
            "paused": gate.paused,
            "retry_after_seconds": RETRY_AFTER_S,
            "reason": gate.pause and gate.pause.reason,
            "inflight": gate.num_in_flight + await pauses.num_in_flight_elsewhere(),
            "held": totals["manege_calls_held"],
            "held_total": totals["manege_calls_held_total"],
            "held_s": totals["manege_calls_held_seconds_total"],
            "engine": await self._services.engine.state(),
            "recorded_since_s": self._services.flights.recorded_since_s,
            "version": await self._services.store.policy_version(),
            "door": self._services.handed.door,
        }
