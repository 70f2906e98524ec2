"""What to do next, from what should run and what does run. Pure and level-triggered: safe to ask at any time.

In: the leases that this controller holds (desired) and the attempts that it runs (actual). Out: actions. A lease that
ran out is no lease: another controller may have taken the rollout over, so its agent must die.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manege.types import RolloutId

__all__ = ["Actions", "Lease", "plan", "retry_after_s"]

_LONGEST_RETRY_S = 300.0
"""Whatever was away will hardly need longer, and a person who mends it should not have to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right and the duty to carry out one attempt."""

    attempt: int
    ends_s: float
    """On the clock that `now_s` is read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """All may be carried out in any order."""

    start: Sequence[RolloutId]
    """Leases without an agent."""
    kill: Sequence[RolloutId]
    """Agents without a lease, or of another attempt than the lease's."""
    renew: Sequence[RolloutId]
    """Leases to prolong now; empty while none is due."""
    num_claim: int
    """Free slots."""


def plan(
    desired: Mapping[RolloutId, Lease],
    actual: Mapping[RolloutId, int],
    *,
    now_s: float,
    slots: int,
    renew_before_s: float,
) -> Actions:
    """`actual`: attempt by rollout. All leases are renewed together, once one of them ends within `renew_before_s`."""
    live = {key: lease for key, lease in desired.items() if lease.ends_s > now_s}
    is_due = any(lease.ends_s - now_s <= renew_before_s for lease in live.values())
    return Actions(
        start=[key for key in live if key not in actual],
        kill=[key for key, attempt in actual.items() if key not in live or live[key].attempt != attempt],
        renew=list(live) if is_due else [],
        num_claim=max(0, slots - len(live.keys() | actual.keys())),
    )


def retry_after_s(attempt: int, first_s: float) -> float:
    """How long a rollout rests after an attempt (from 0) that the infrastructure failed."""
    return min(_LONGEST_RETRY_S, first_s * 2**attempt)
