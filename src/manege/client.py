"""The typed client of the gateway's own API, for controllers and trainers.

What flows: dataclasses of the glossary, as JSON; calls with their arrays as bytes (`store/wire.py`). The gateway's
errors come back as the classes of `errors.py`, by their `code`. Connection errors and 503 are tried again, with jitter:
a gateway that restarts, or a store that is away, is waited for; what pauses, resumes or changes an engine waits for it
too. Nothing else is tried again. A write whose answer was lost is thus sent twice: creation is idempotent by id,
a repeated `finish` gets ConflictError, a repeated publication counts another version, and what a lost claim took comes
back with the next one, which says what is held.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx
import orjson
from pydantic import TypeAdapter

from manege import errors
from manege.engine.base import Weights
from manege.errors import EngineAwayError, ManegeError, StoreError, UnavailableError
from manege.logs import get_logger, kv
from manege.store.base import Ending, Run, TerminalPage
from manege.store.codec import ROLLOUT, ROLLOUT_PAGE, ROLLOUTS, RUN, TERMINAL_PAGE
from manege.store.wire import decode_calls
from manege.types import (
    Call,
    Event,
    JsonObject,
    PolicyVersion,
    Rollout,
    RolloutId,
    RolloutSpec,
    RolloutState,
    RunId,
)

__all__ = ["CLAIMS", "Claim", "Client"]

PATIENCE_S = 60.0
"""For a gateway that answered before and is away."""
FIRST_PATIENCE_S = 3.0
"""For one that never did: the address may be wrong."""
MAX_DELAY_S = 2.0
"""Between two tries; the first one is 0.1 s, and each doubles it."""
TIMEOUT_S = 60.0
"""For an answer, beside the time that the gateway was asked to wait."""
KEEP_S = 60.0
"""Of an idle connection. httpcore fails a request whose connection expires between its choice and its use, which bursts
of work met often with the 5 s of httpx; routers forget connections after minutes."""
CALLS_PER_REQUEST = 64
"""Rollouts whose calls are fetched at once: bounds the size of one answer."""

ROLLOUTS_PER_REQUEST = 500

_AWAY = (UnavailableError, StoreError)
_ENGINE_AWAY = (*_AWAY, EngineAwayError)

_log = get_logger("client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An attempt that a controller shall carry out."""

    rollout: Rollout
    agent_key: str
    """Good for the model calls and events of this attempt."""
    scorer_key: str
    """Good for its rewards, for a scorer that is out of the controller's reach."""


CLAIMS = TypeAdapter(list[Claim])

_ERRORS: dict[str, type[ManegeError]] = {
    cls.code: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ManegeError)
}


class Client:
    """One gateway, seen by a holder of its operator key."""

    def __init__(self, base_url: str, key: str) -> None:
        self.url = base_url.rstrip("/")
        """Also where agents find the gateway."""
        # Long polls hold a connection each. Proxies of the environment are for the outside.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEP_S)
        self._transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"authorization": f"Bearer {key}"},
            timeout=TIMEOUT_S,
            transport=self._transport,
            trust_env=False,
        )
        self._has_answered = False
        self._away_s: float | None = None
        """Since when it is away; None: it is not."""
        self._asking = asyncio.Lock()
        self._door: tuple[str | None] | None = None
        """None: not yet asked for."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. Safe to repeat."""
        await self._http.aclose()

    async def put_run(self, run_id: RunId, config: JsonObject) -> Run:
        """Create a run or replace its config."""
        return RUN.validate_json(await self._send("PUT", f"/api/runs/{run_id}", {"config": config}))

    async def get_run(self, run_id: RunId) -> Run:
        """Raises NotFoundError."""
        return RUN.validate_json(await self._send("GET", f"/api/runs/{run_id}"))

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> list[Rollout]:
        """Queue rollouts; those that exist already are returned as they are."""
        return ROLLOUTS.validate_json(await self._send("POST", "/api/rollouts/batch", list(specs)))

    async def get_rollout(self, rollout_id: RolloutId) -> Rollout:
        """Raises NotFoundError."""
        return ROLLOUT.validate_json(await self._send("GET", f"/api/rollouts/{rollout_id}?format=manege"))

    async def open_rollouts(
        self, run: RunId, states: Sequence[RolloutState] = (RolloutState.QUEUING, RolloutState.RUNNING)
    ) -> list[Rollout]:
        """Rollouts of a run that have not ended, oldest first."""
        found: list[Rollout] = []
        query = {"format": "manege", "run": run, "state": list(states), "limit": ROLLOUTS_PER_REQUEST, "after": 0}
        while True:
            answer = await self._send("GET", f"/api/rollouts?{httpx.QueryParams(query)}")
            page = ROLLOUT_PAGE.validate_json(answer)
            if not page.rollouts:
                return found
            found += page.rollouts
            query["after"] = page.cursor

    async def terminal(self, *, run: RunId | None, after: int, limit: int = 256, wait_s: float = 0) -> TerminalPage:
        """Rollouts that ended after the cursor `after`; with none yet, the answer waits up to `wait_s`."""
        query = {"format": "manege", "after": after, "limit": limit, "wait_s": wait_s, **({"run": run} if run else {})}
        page = await self._send("GET", f"/api/rollouts/terminal?{httpx.QueryParams(query)}", wait_s=wait_s)
        return TERMINAL_PAGE.validate_json(page)

    async def claim(
        self,
        *,
        controller: str,
        limit: int,
        lease_s: float,
        wait_s: float = 0,
        holding: Sequence[RolloutId] | None = None,
    ) -> list[Claim]:
        """Take rollouts to carry out; with none queued, the answer waits up to `wait_s`. `holding`: all that this
        controller still carries out; what else is leased to its name was lost and is queued again."""
        body = {"controller": controller, "limit": limit, "lease_s": lease_s, "wait_s": wait_s, "holding": holding}
        return CLAIMS.validate_json(await self._send("POST", "/api/leases", body, wait_s=wait_s))

    async def held(self, *, controller: str, lease_s: float) -> list[Claim]:
        """What a controller of this name had when it was last heard of, to go on with; its leases begin anew."""
        body = {"controller": controller, "lease_s": lease_s}
        return CLAIMS.validate_json(await self._send("POST", "/api/leases/held", body))

    async def renew(self, *, controller: str, rollout_ids: Sequence[RolloutId], lease_s: float) -> list[RolloutId]:
        """Prolong leases, or give the rollouts back (0 s); returns those that were lost."""
        body = {"controller": controller, "rollout_ids": list(rollout_ids), "lease_s": lease_s}
        return orjson.loads(await self._send("POST", "/api/leases/renew", body))["lost"]

    async def finish(self, rollout_id: RolloutId, attempt: int, ending: Ending) -> Rollout:
        """End an attempt. Raises ConflictError when it is over already."""
        path = f"/api/rollouts/{rollout_id}/attempt/{attempt}/finish"
        return ROLLOUT.validate_json(await self._send("POST", path, ending))

    async def rescore(self, rollout_id: RolloutId, attempt: int, ending: Ending, *, scorer: str) -> Rollout:
        """Change the verdict of a rollout that has ended. `ending`: as it would end now; its evidence stays as it was.
        `scorer`: what judged."""
        body = {"outcome": ending.outcome, "reward": ending.reward, "message": ending.message, "scorer": scorer}
        body["call_rewards"] = ending.call_rewards
        path = f"/api/rollouts/{rollout_id}/attempt/{attempt}/rescore"
        return ROLLOUT.validate_json(await self._send("POST", path, body))

    async def cancel(self, rollout_id: RolloutId) -> Rollout:
        """End a rollout at once; a terminal one is returned as it is."""
        return ROLLOUT.validate_json(await self._send("POST", f"/api/rollouts/{rollout_id}/cancel"))

    async def calls(self, rollout_ids: Sequence[RolloutId]) -> dict[RolloutId, list[Call]]:
        """The calls of the last attempt of each rollout, in the order in which they were answered. Their arrays are
        read-only views of the answer, so that what one request brought stays in memory together."""
        found: dict[RolloutId, list[Call]] = {}
        for first in range(0, len(rollout_ids), CALLS_PER_REQUEST):
            body = {"rollout_ids": list(rollout_ids[first : first + CALLS_PER_REQUEST])}
            found |= decode_calls(await self._send("POST", "/api/calls", body))
        return found

    async def add_event(self, rollout_id: RolloutId, attempt: int, event_type: str, data: JsonObject) -> None:
        """Append to a rollout's log."""
        body = {"event_type": event_type, "data": data}
        await self._send("POST", f"/api/rollouts/{rollout_id}/attempt/{attempt}/events", body)

    async def events(self, rollout_id: RolloutId, event_type: str) -> list[Event]:
        """The events of one type of a rollout's last attempt, in the order of time."""
        query = httpx.QueryParams({"event_type": event_type})
        answer = await self._send("GET", f"/api/rollouts/{rollout_id}/events?{query}")
        return [
            Event(
                rollout_id=rollout_id,
                attempt=int(view["attempt_id"]),
                event_type=event_type,
                data=view["data"],
                timestamp_s=view["timestamp"],
            )
            for view in orjson.loads(answer)
        ]

    async def pause(self, *, drain_s: float = 600, keep: bool = False) -> dict[str, Any]:
        """Hold new model calls, let those in flight end for at most `drain_s`, pause the engine; what did not end goes
        on after `resume`, with `keep` over the cache that it has. Answers the `state`, its counts of rollouts apart."""
        body = {"drain_s": drain_s, "keep": keep}
        return orjson.loads(await self._send("POST", "/proxy/pause", body, wait_s=drain_s, away=_ENGINE_AWAY))

    async def resume(self) -> dict[str, Any]:
        """Let everything go on. Safe to call when not paused. Answers as `pause` does."""
        return orjson.loads(await self._send("POST", "/proxy/resume", {}, away=_ENGINE_AWAY))

    async def publish(self, weights: Weights) -> PolicyVersion:
        """Give the engine new weights under a new version. Raises ConflictError unless paused."""
        answer = await self._send("POST", "/proxy/weights", weights, away=_ENGINE_AWAY)
        return PolicyVersion(orjson.loads(answer)["version"])

    async def state(self, *, run: RunId | None = None) -> dict[str, Any]:
        """Whether the gateway is paused, its calls in flight and held, the policy version, how its engines are, and
        rollouts per state."""
        return orjson.loads(await self._send("GET", "/proxy/state" + (f"?run={run}" if run else "")))

    async def door(self, *, lost: str | None = None) -> str | None:
        """The abstract Unix socket where the gateway takes listening sockets, if it has one; whether it can be reached
        from here is another question. Asked for once, and again when it is `lost`: behind the one that is known, nobody
        answers any more."""
        async with self._asking:
            if self._door is None or (lost is not None and self._door[0] == lost):
                self._door = ((await self.state()).get("door"),)
            return self._door[0]

    async def forward(self, request: httpx.Request) -> httpx.Response:
        """Send somebody else's request as it is, without our key; who asks streams and closes the answer. Raises
        httpx.TransportError: nothing is tried again."""
        return await self._transport.handle_async_request(request)

    async def context_limit(self, rollout: Rollout) -> int:
        """Tokens of prompt + answer that the model of a running rollout has room for."""
        mode = "train" if rollout.spec.is_train else "val"
        path = f"/proxy/rollout/{rollout.spec.id}/attempt/{rollout.attempt}/mode/{mode}/openai/v1/models"
        return orjson.loads(await self._send("GET", path))["data"][0]["max_model_len"]

    async def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        wait_s: float = 0,
        away: tuple[type[ManegeError], ...] = _AWAY,
    ) -> bytes:
        """`away`: what is tried again. What began while the gateway was away waits no longer than the others."""
        content = None if body is None else orjson.dumps(body)
        delay_s, since_s = 0.1, None
        while True:
            try:
                answer = await self._send_once(method, path, content, wait_s)
                self._has_answered, self._away_s = True, None
                return answer
            except away as error:
                if self._away_s is None:
                    self._away_s = time.monotonic()
                    _log.info(kv("trying again", reason=error))
                since_s = since_s or self._away_s
                patience_s = PATIENCE_S if self._has_answered else FIRST_PATIENCE_S
                if time.monotonic() - since_s > patience_s:
                    raise
            await asyncio.sleep(delay_s * random.uniform(0.75, 1.25))
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _send_once(self, method: str, path: str, content: bytes | None, wait_s: float) -> bytes:
        try:
            response = await self._http.request(method, path, content=content, timeout=TIMEOUT_S + wait_s)
        except httpx.TransportError as error:
            raise UnavailableError(
                f"{method} {self.url}{path} failed ({type(error).__name__}: {error}); is the gateway running?"
            ) from error
        if not response.is_success:
            raise _failure(response)
        return response.content


def _failure(response: httpx.Response) -> ManegeError:
    """The gateway's error object as our exception."""
    try:
        error = orjson.loads(response.content)["error"]
        return _ERRORS.get(error["code"], ManegeError)(error["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        request = response.request
        return ManegeError(
            f"{request.method} {request.url} answered {response.status_code} without our error object; "
            "is this the address of a manege gateway?"
        )
