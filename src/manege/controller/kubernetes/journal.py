"""What a runner writes into a rollout's log, for whoever goes on with the attempt, and what a scorer wrote there.

`kubernetes.job` {job, cluster, namespace}: where the Job is, before it is made. `kubernetes.pod` {job, uid, pod}: which
pod the attempt is bound to, before that one gets its keys.
"""

from typing import Any

from manege.client import Claim, Client
from manege.controller.reach import reach
from manege.controller.verdict import Verdict
from manege.types import JsonObject

__all__ = ["Journal"]


class Journal:
    """Waits for a gateway that is away."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def posted(self, claim: Claim) -> Verdict | None:
        """The last reward that a scorer posted with its key."""
        rollout = claim.rollout
        events = await reach(lambda: self._client.events(rollout.spec.id, "reward"))
        own = [event for event in events if event.attempt == rollout.attempt]
        return Verdict(reward=float(own[-1].data["value"])) if own else None

    async def event(self, claim: Claim, kind: str, job: str) -> JsonObject | None:
        """What was noted of a Job of this attempt; None: nothing."""
        rollout = claim.rollout
        events = await reach(lambda: self._client.events(rollout.spec.id, kind))
        own = (event.data for event in events if event.attempt == rollout.attempt and event.data.get("job") == job)
        return next(own, None)

    async def note(self, claim: Claim, kind: str, **data: Any) -> None:
        """Durable when it returns."""
        rollout = claim.rollout
        await reach(lambda: self._client.add_event(rollout.spec.id, rollout.attempt, kind, data))
