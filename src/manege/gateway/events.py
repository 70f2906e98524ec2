"""Routes of a rollout's log: agents and operators append, operators read (in Agent Lightning's shapes).

Nobody writes `model_request`, since calls are shown so. An agent may not write what only we may say (`late.*`,
`policy.*`, `call.*`, `hack.*`, `kubernetes.*`), and rewards only where the run lets its agents judge themselves:
`reward` {"value": number} of the rollout, `call_reward` {"call": id, "value": number} of one call. Elsewhere that it
tried is kept. The last one counts, so sending it again does no harm. A call's id is that of its answer, as the agent
saw it; it is kept without what protocols put before it.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manege.errors import ForbiddenError
from manege.gateway import lightning
from manege.gateway.auth import AgentIdentity
from manege.gateway.declare import asks, takes
from manege.gateway.services import Services
from manege.http import answer, validated
from manege.types import REFUSED_REWARD, CallId, Event, JsonObject, RolloutId

__all__ = ["event_routes"]

MAX_EVENT_BYTES = 1024 * 1024
"""Logs are for people; large results belong into files."""
OUR_EVENTS = ("late.", "policy.", "call.", "hack.", "kubernetes.", "rescored")
CALL_EVENT = "model_request"
"""How calls are shown in a log; nobody writes it."""


class _NewEvent(BaseModel):
    event_type: Annotated[str, Field(min_length=1, max_length=200)]
    data: dict[str, Any] = Field(default_factory=dict)


class _Reward(BaseModel):
    value: Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _CallReward(_Reward):
    call: Annotated[str, Field(min_length=1, max_length=200)]


class _LogQuery(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    event_type: str | None = None
    """Unset: events of every type."""
    format: Literal["triplet"] | None = None
    """`triplet`: prompt, response and reward per call."""


_REWARD, _CALL_REWARD = TypeAdapter(_Reward), TypeAdapter(_CallReward)
_REWARDS = ("reward", "call_reward")
_BEFORE_ID = re.compile(r"^(chatcmpl-|cmpl-|resp_|msg_)")
"""What protocols put before a call's id; Gemini's shows it as it is."""


def event_routes(services: Services) -> list[Route]:
    """Appending takes an agent's key, too."""
    handlers, auth = _Events(services), services.auth
    append = auth.agent(handlers.append, late="late.event")
    return [
        Route("/api/rollouts/{rollout_id}/attempt/{attempt}/events", append, methods=["POST"]),
        Route("/api/rollouts/{rollout_id}/events", auth.operator(handlers.list), methods=["GET"]),
    ]


class _Events:
    def __init__(self, services: Services) -> None:
        self._services = services

    @takes(_NewEvent, MAX_EVENT_BYTES)
    async def append(self, _request: Request, body: _NewEvent, identity: AgentIdentity) -> Response:
        """Append to an attempt's log, also with the agent's key; rewards only where `reward_from` is `agent`."""
        if body.event_type == CALL_EVENT:
            raise ForbiddenError(f"events of type {CALL_EVENT!r} are calls that the gateway recorded; use another name")
        if not identity.is_operator:
            try:
                _check_agent_may(identity, body.event_type)
            except ForbiddenError:
                if body.event_type in _REWARDS:
                    await self._add(identity, REFUSED_REWARD, {})
                raise
        data = body.data
        if body.event_type == "reward":
            validated(_REWARD, data)
        if body.event_type == "call_reward":
            data = data | {"call": await self._rewarded_call(identity, validated(_CALL_REWARD, data).call)}
        return answer(lightning.event_view(await self._add(identity, body.event_type, data)))

    @asks(_LogQuery)
    async def list(self, request: Request, query: _LogQuery) -> Response:
        """A rollout's log, by `event_type`; `?format=triplet` gives prompt, response and reward per call."""
        rollout_id = RolloutId(request.path_params["rollout_id"])
        rollout = await self._services.store.get_rollout(rollout_id)
        wanted = query.event_type
        events = await self._services.store.events(rollout_id)
        calls = (await self._services.store.calls([rollout_id]))[rollout_id] if wanted in (None, CALL_EVENT) else ()
        views = lightning.events_view(rollout, events, calls, self._services.model_name)
        views = [view for view in views if wanted in (None, view["event_type"])]
        return answer(lightning.triplets(views) if query.format else views)

    async def _add(self, identity: AgentIdentity, event_type: str, data: JsonObject) -> Event:
        event = Event(
            rollout_id=identity.rollout_id,
            attempt=identity.attempt,
            event_type=event_type,
            data=data,
            timestamp_s=self._services.clock(),
        )
        await self._services.store.add_event(event)
        return event

    async def _rewarded_call(self, identity: AgentIdentity, shown: str) -> CallId:
        """Raises UnprocessableError for one that the attempt did not make."""
        call_id = CallId(_BEFORE_ID.sub("", shown))
        await self._services.store.check_calls(identity.rollout_id, identity.attempt, [call_id])
        return call_id


def _check_agent_may(identity: AgentIdentity, event_type: str) -> None:
    if identity.is_scorer:
        if event_type not in _REWARDS:
            raise ForbiddenError(f"a scorer's key is good for rewards, not for events of type {event_type!r}")
        return
    if event_type.startswith(OUR_EVENTS):
        raise ForbiddenError(f"events of type {event_type!r} are written by manege; choose another name")
    if event_type in _REWARDS and identity.rollout.spec.reward_from != "agent":
        raise ForbiddenError(
            'this run is judged by its scorer; an agent may post rewards only with scorer.reward_from = "agent"'
        )
