"""What the store gives and takes beside the glossary's types.

The store itself is `sql.SqlStore`, on SQLite and on PostgreSQL; its reading half, for looks at a run's database while
its gateway works, is `reading.StoreReader`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manege.types import (
    CallId,
    FloatArray,
    IntArray,
    JsonObject,
    Outcome,
    Rollout,
    RolloutId,
    RolloutState,
    RunId,
)

__all__ = ["EVERYTHING", "Changes", "Ending", "GatewayState", "RolloutPage", "Run", "StoredCall", "TerminalPage"]


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
    is_final: bool = False
    """No other attempt, even of an infrastructure failure: what failed came after the agent had done its work."""
    retry_after_s: float = 0
    """Until another attempt may begin, where this end allows one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalPage:
    """Rollouts that ended, in the order of completion, and the cursor to ask for the next page."""

    rollouts: Sequence[Rollout]
    cursor: int
    num_ended: int
    """Rollouts of all runs that ended so far, deleted ones included: the highest cursor there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPage:
    """Rollouts in the order of creation, and the cursor to ask for the next page."""

    rollouts: Sequence[Rollout]
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCall:
    """A call as what it adds to another one of its attempt."""

    record: bytes
    """What the call holds beside its arrays, as JSON (`codec.call_record`)."""
    new_ids_N: IntArray
    """The tokens of the prompt that follow the shared ones."""
    response_ids_R: IntArray
    logprobs_R: FloatArray
    base: int | None
    """Position, in the list that this one stands in, of the earlier call whose prompt + response begins with the shared
    tokens; None: nothing is shared."""
    num_shared: int
    """Leading tokens of the prompt that are left out of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What one commit changed, of this process or of another gateway of the same database."""

    rollouts: frozenset[RolloutId] = frozenset()
    """Created, claimed, ended or deleted."""
    runs: frozenset[RunId] = frozenset()
    """Whose config was put."""
    keys: frozenset[str] = frozenset()
    """Values that were set."""
    everything: bool = False
    """Anything may have changed: a connection was lost, or the change was too large to tell."""


EVERYTHING = Changes(everything=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """A run in numbers."""

    states: Mapping[RolloutState, int]
    """Rollouts per state, as are ..."""
    outcomes: Mapping[Outcome, int]
    """... those that ended per outcome."""
    reward_mean: float | None
    """Of training rollouts and evaluations that have a reward."""
    num_calls: int
    """Of all attempts, as is ..."""
    sampled_tokens: int
    """... what they sampled."""
    first_s: float | None
    """When the first rollout was created, and ..."""
    last_s: float | None
    """... when one was last created, started or ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayState:
    """The sign of life of one gateway of this database."""

    id: str
    seen_s: float
    state: JsonObject
