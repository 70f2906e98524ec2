"""Routes of rollouts: created, listed, watched, ended; Agent Lightning's shapes, or ours with `format=manege`."""

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manege.errors import ConflictError, NotFoundError, UnprocessableError
from manege.gateway import lightning
from manege.gateway.auth import path_attempt
from manege.gateway.declare import answers, asks, takes
from manege.gateway.services import Services
from manege.http import answer
from manege.store.base import Ending, TerminalPage
from manege.store.wire import MEDIA_TYPE, encode_calls
from manege.types import (
    CallId,
    GroupId,
    JsonObject,
    Outcome,
    Rollout,
    RolloutId,
    RolloutSpec,
    RolloutState,
    RunId,
)

__all__ = ["rollout_routes"]


Limit = Annotated[int, Field(ge=1, le=1000)]
Position = Annotated[int, Field(ge=0, lt=2**63)]
"""What SQLite can count."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _Query(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    format: Literal["manege"] | None = None
    """`manege`: our own shape; unset: Agent Lightning's."""


class _ListQuery(_Query):
    run: RunId | None = None
    """Only with our shape, as `state`, `group`, `since_s`, `until_s` and `after`."""
    state: list[RolloutState] = Field(default_factory=list)
    group: GroupId | None = None
    since_s: float | None = None
    """Created then or later, seconds since the epoch."""
    until_s: float | None = None
    """Created before."""
    after: Position = 0
    """The cursor of the page before."""
    state_in: list[RolloutState] = Field(default_factory=list)
    """Only with Agent Lightning's shape."""
    limit: Limit = 500


class _TerminalQuery(_Query):
    run: RunId | None = None
    after: Annotated[int, Field(ge=-1, lt=2**63)] = 0
    """The cursor of the page before; -1: from the start."""
    limit: Limit = 500
    wait_s: Annotated[float, Field(ge=0, le=300)] = 0


class _Finish(BaseModel):
    model_config = ConfigDict(extra="forbid")

    outcome: Outcome
    reward: Number | None = None
    message: str | None = None
    evidence: dict[str, Any] = Field(default_factory=dict)
    call_rewards: dict[CallId, Number] = Field(default_factory=dict)
    is_final: bool = False
    """No other attempt, even of an infrastructure failure."""
    retry_after_s: Annotated[float, Field(ge=0, le=3600)] = 0


class _Rescore(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    outcome: Literal[Outcome.OK, Outcome.AGENT_ERROR, Outcome.AGENT_TIMEOUT]
    reward: Number | None = None
    message: str | None = None
    call_rewards: dict[CallId, Number] = Field(default_factory=dict)
    scorer: Annotated[str, Field(min_length=1, max_length=200)]
    """What judged, for the log."""


class _RolloutIds(BaseModel):
    rollout_ids: Annotated[list[RolloutId], Field(max_length=1000)]


def rollout_routes(services: Services) -> list[Route]:
    """All of them need the operator key."""
    handlers, operator = _Rollouts(services), services.auth.operator
    one = "/api/rollouts/{rollout_id}"
    return [
        Route("/api/rollouts", operator(handlers.create), methods=["POST"]),
        Route("/api/rollouts", operator(handlers.list), methods=["GET"]),
        Route("/api/rollouts/batch", operator(handlers.create_batch), methods=["POST"]),
        Route("/api/rollouts/terminal", operator(handlers.terminal), methods=["GET"]),
        Route(one, operator(handlers.get), methods=["GET"]),
        Route(one, operator(handlers.patch), methods=["PATCH"]),
        Route(one, operator(handlers.delete), methods=["DELETE"]),
        Route(f"{one}/cancel", operator(handlers.cancel), methods=["POST"]),
        Route(f"{one}/attempt/{{attempt}}/finish", operator(handlers.finish), methods=["POST"]),
        Route(f"{one}/attempt/{{attempt}}/rescore", operator(handlers.rescore), methods=["POST"]),
        Route("/api/calls", operator(handlers.calls), methods=["POST"]),
    ]


class _Rollouts:
    def __init__(self, services: Services) -> None:
        self._store = services.store
        self._feed = services.feed

    @takes(list[lightning.Create])
    @answers(201)
    async def create(self, _request: Request, creates: Sequence[lightning.Create]) -> Response:
        """Queue one rollout (Agent Lightning's shape); an id that exists is answered as it is."""
        created = await self._store.create_rollouts([lightning.to_spec(create) for create in creates])
        return answer([lightning.rollout_view(rollout) for rollout in created], 201)

    @takes(list[RolloutSpec])
    @answers(201)
    async def create_batch(self, _request: Request, specs: Sequence[RolloutSpec]) -> Response:
        """Queue rollouts of our own shape, all or nothing; ids that exist are answered as they are."""
        for spec in specs:
            _check(spec)
        created = await self._store.create_rollouts(specs)
        return answer(created, 201)

    @asks(_ListQuery)
    async def list(self, _request: Request, query: _ListQuery) -> Response:
        """Rollouts by state, oldest first; `?format=manege` for our shape: by run, state, group and time, in pages."""
        if query.format == "manege":
            page = await self._store.list_rollouts(
                run=query.run,
                state=query.state or None,
                group=query.group,
                since_s=query.since_s,
                until_s=query.until_s,
                after=query.after,
                limit=query.limit,
            )
            return answer(page)
        states = set(query.state_in or RolloutState)
        if RolloutState.FAILED in states:
            states.add(RolloutState.CANCELLED)
        page = await self._store.list_rollouts(state=states, limit=query.limit)
        return answer([lightning.rollout_view(rollout) for rollout in page.rollouts])

    @asks(_TerminalQuery)
    async def terminal(self, request: Request, query: _TerminalQuery) -> Response:
        """Rollouts that ended after a cursor, in the order of completion; waits up to `wait_s` for the next."""

        async def read() -> TerminalPage | None:
            nonlocal page
            page = await self._store.terminal(run=query.run, after=query.after, limit=query.limit)
            return page if page.rollouts else None

        page = TerminalPage(rollouts=[], cursor=query.after, num_ended=0)
        await self._feed.poll(request, query.wait_s, read, None)
        return answer(page if query.format == "manege" else lightning.terminal_view(page))

    @asks(_Query)
    async def get(self, request: Request, query: _Query) -> Response:
        """One rollout; `?format=manege` for our shape."""
        rollout = await self._store.get_rollout(_rollout_id(request))
        if query.format == "manege":
            return answer(rollout)
        attempts = [] if rollout.started_s is None else [str(attempt) for attempt in range(rollout.attempt + 1)]
        return answer({"rollout": lightning.rollout_view(rollout), "attempts": attempts})

    @takes(lightning.Patch)
    async def patch(self, request: Request, body: lightning.Patch) -> Response:
        """Change its state (Agent Lightning's controller does)."""
        patch = body.status
        rollout = await self._store.get_rollout(_rollout_id(request))
        if patch is not None and patch.state is not None:
            rollout = await self._report(rollout, patch)
        return answer(lightning.rollout_view(rollout))

    @answers(204)
    async def delete(self, request: Request) -> Response:
        """Remove a rollout with its calls and events."""
        try:
            await self._store.delete_rollout(_rollout_id(request))
        except NotFoundError:
            pass  # Agent Lightning's clients delete again after a lost answer.
        return Response(status_code=204)

    async def cancel(self, request: Request) -> Response:
        """End a rollout at once; its key is dead, its controller kills the agent."""
        return answer(await self._store.cancel(_rollout_id(request)))

    @takes(_Finish)
    async def finish(self, request: Request, body: _Finish) -> Response:
        """End an attempt with its outcome, reward and evidence; an infrastructure failure may queue another one."""
        ending = Ending(
            outcome=body.outcome,
            reward=body.reward,
            message=body.message,
            evidence=body.evidence,
            call_rewards=body.call_rewards,
            is_final=body.is_final,
            retry_after_s=body.retry_after_s,
        )
        return answer(await self._store.finish(_rollout_id(request), path_attempt(request), ending))

    @takes(_Rescore)
    async def rescore(self, request: Request, body: _Rescore) -> Response:
        """Change the verdict of a rollout that has ended; the one before stays in its log as an event `rescored`."""
        ending = Ending(outcome=body.outcome, reward=body.reward, message=body.message, call_rewards=body.call_rewards)
        rollout_id, attempt = _rollout_id(request), path_attempt(request)
        return answer(await self._store.rescore(rollout_id, attempt, ending, scorer=body.scorer))

    @answers(200, MEDIA_TYPE)
    @takes(_RolloutIds)
    async def calls(self, _request: Request, body: _RolloutIds) -> Response:
        """The model calls of the last attempts of some rollouts, with their tokens, as bytes of our own format."""
        found = await self._store.stored_calls(body.rollout_ids)
        # In a thread: agents' calls shall not wait for it.
        return Response(await asyncio.to_thread(encode_calls, found), media_type=MEDIA_TYPE)

    async def _report(self, rollout: Rollout, patch: lightning.StatusPatch) -> Rollout:
        """What Agent Lightning's controller saw: it starts rollouts without a lease and reports how they ended."""
        evidence: JsonObject = {"k8s_job_name": patch.k8s_job_name} if patch.k8s_job_name else {}
        if patch.state == "queuing":
            raise ConflictError(f"rollout {rollout.spec.id} is {rollout.state} and cannot become queuing")
        if patch.state == "running":
            return await self._store.start(rollout.spec.id, evidence=evidence)
        outcome = Outcome.OK if patch.state == "succeeded" else Outcome.AGENT_ERROR
        ending = Ending(outcome=outcome, message=patch.error_message, evidence=evidence)
        return await self._store.finish(rollout.spec.id, rollout.attempt, ending)


def _rollout_id(request: Request) -> RolloutId:
    return RolloutId(request.path_params["rollout_id"])


def _check(spec: RolloutSpec) -> None:
    if not re.fullmatch(lightning.ROLLOUT_ID_PATTERN, spec.id):
        raise UnprocessableError(f"rollout id {spec.id!r}: use up to 200 letters, digits and any of . _ : -")
    if spec.reward_from not in ("scorer", "agent"):
        raise UnprocessableError(f"rollout {spec.id}: reward_from = {spec.reward_from!r} must be 'scorer' or 'agent'")
    if lightning.KEPT in spec.metadata:
        raise UnprocessableError(f"rollout {spec.id}: metadata.{lightning.KEPT} is the gateway's own; use another name")
    if spec.max_attempts < 1:
        raise UnprocessableError(f"rollout {spec.id}: max_attempts = {spec.max_attempts} must be at least 1")
