"""What the store gives and takes beside the glossary's types.

The store itself is `sql.SqlStore`; PostgreSQL will come through the same code, so there is no second definition of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manege.types import CallId, JsonObject, Outcome, Rollout, RunId

__all__ = ["Ending", "Run", "TerminalPage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training, evaluation or collection."""

    id: RunId
    config: JsonObject
    """The run's config tree as JSON: the controller reads agent, scorer and limits from it."""
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended."""

    outcome: Outcome
    reward: float | None = None
    """A finite number, or None: then it is the outcome's default."""
    message: str | None = None
    """One line for people."""
    evidence: JsonObject = field(default_factory=dict)
    """Added to what the rollout has already."""
    call_rewards: Mapping[CallId, float] = field(default_factory=dict)
    """Finite numbers for single calls of this attempt; they become `call_reward` events when the rollout ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalPage:
    """Rollouts that ended, in the order of completion, and the cursor to ask for the next page."""

    rollouts: Sequence[Rollout]
    cursor: int
    num_ended: int
    """Rollouts of all runs that ended so far, deleted ones included: the highest cursor there is."""
