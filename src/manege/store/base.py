"""What the gateway asks of its store.

Concurrency: one writer; every method that writes returns only when its write is durable (it survives `kill -9`).
Writes of many callers share one commit. Readers see committed data only.

State rules live here, since only the database can decide races: a transition that `TRANSITIONS` does not allow, a
second terminal state, or a write for an attempt that is no longer the current one raises ConflictError.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from manege.types import (
    Call,
    CallId,
    Delivered,
    Event,
    JsonObject,
    Outcome,
    PolicyVersion,
    Rollout,
    RolloutId,
    RolloutSpec,
    RolloutState,
    RunId,
)

__all__ = ["Run", "Store", "TerminalPage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training, evaluation or collection."""

    id: RunId
    config: JsonObject
    """The run's config tree as JSON: the controller reads agent, scorer and limits from it."""
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalPage:
    """Rollouts that ended, in the order of completion, and the cursor to ask for the next page."""

    rollouts: Sequence[Rollout]
    cursor: int
    num_ended: int
    """Rollouts of all runs that ended so far, deleted ones included: the highest cursor there is."""


class Store(Protocol):
    """Implementations: sql (SQLite; PostgreSQL later through the same code)."""

    async def put_run(self, run_id: RunId, config: JsonObject) -> Run:
        """Create or replace the config of a run."""
        ...

    async def get_run(self, run_id: RunId) -> Run:
        """Raises NotFoundError."""
        ...

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> Sequence[Rollout]:
        """Queue rollouts; an id that exists already is returned as it is. All or nothing."""
        ...

    async def get_rollout(self, rollout_id: RolloutId) -> Rollout:
        """Raises NotFoundError."""
        ...

    async def list_rollouts(
        self, *, run: RunId | None = None, state: RolloutState | None = None, limit: int = 50, offset: int = 0
    ) -> Sequence[Rollout]:
        """Oldest first."""
        ...

    async def count_rollouts(self, *, run: RunId | None = None) -> Mapping[RolloutState, int]:
        """Rollouts per state."""
        ...

    async def terminal(self, *, run: RunId | None, after: int, limit: int) -> TerminalPage:
        """Rollouts with completion > after, in that order; none is missed, none comes twice."""
        ...

    async def claim(self, *, controller: str, limit: int, lease_s: float) -> Sequence[Rollout]:
        """Take queued rollouts (oldest first): queuing -> running under a lease of this controller.
        A running rollout whose lease ran out is taken over as a new attempt; one with no attempt left is finished as
        infra_error instead."""
        ...

    async def start(self, rollout_id: RolloutId, *, evidence: JsonObject) -> Rollout:
        """queuing -> running without a lease, for a controller that has none (Agent Lightning's).
        Raises ConflictError."""
        ...

    async def renew(self, *, controller: str, rollout_ids: Sequence[RolloutId], lease_s: float) -> Sequence[RolloutId]:
        """Prolong leases; returns those that this controller has lost (cancelled, taken over or deleted). With 0 s they
        are given up: back to queuing as a new attempt, which is granted on top of `max_attempts`."""
        ...

    async def finish(
        self,
        rollout_id: RolloutId,
        attempt: int,
        *,
        outcome: Outcome,
        reward: float | None,
        message: str | None,
        evidence: JsonObject,
    ) -> Rollout:
        """End an attempt. infra_error with attempts left: back to queuing with attempt + 1. Otherwise the rollout is
        terminal with `reward`, or the outcome's default when None; with `reward_from = "agent"` the last `reward`
        event of this attempt stands in for None. Raises ConflictError for another attempt or a terminal rollout."""
        ...

    async def cancel(self, rollout_id: RolloutId) -> Rollout:
        """Terminal at once, outcome cancelled; a terminal rollout is returned as it is."""
        ...

    async def delete_rollout(self, rollout_id: RolloutId) -> None:
        """Remove a rollout with its calls and events. Raises NotFoundError."""
        ...

    async def add_call(self, call: Call) -> None:
        """Keep a call. The prompt is stored as what it adds to its parent."""
        ...

    async def set_delivered(self, call_id: CallId, delivered: Delivered) -> None:
        """Note whether the agent got the answer."""
        ...

    async def calls(self, rollout_ids: Sequence[RolloutId]) -> Mapping[RolloutId, Sequence[Call]]:
        """The calls of the last attempt of each rollout, in the order in which they were answered."""
        ...

    async def add_event(self, event: Event) -> None:
        """Append to a rollout's log. Raises NotFoundError."""
        ...

    async def events(self, rollout_id: RolloutId, *, event_type: str | None = None) -> Sequence[Event]:
        """In the order of insertion."""
        ...

    async def policy_version(self) -> PolicyVersion:
        """The last published version; 0 before the first."""
        ...

    async def publish_version(self) -> PolicyVersion:
        """Count one up, durably, and return it."""
        ...

    async def get_value(self, key: str) -> Any:
        """A small JSON value of ours (keys, registered models); None when unset."""
        ...

    async def set_value(self, key: str, value: Any) -> None: ...

    async def close(self) -> None:
        """Finish pending writes and close. Safe to repeat."""
        ...
