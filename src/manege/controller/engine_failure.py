"""Whether engine, gateway or store failed an agent that came to a bad end or to nothing."""

from collections.abc import Sequence

from manege.client import Client
from manege.controller.reach import reach
from manege.errors import EngineError, UnavailableError
from manege.types import Call, Delivered, Rollout

__all__ = ["check_engine"]


async def check_engine(client: Client, rollout: Rollout, calls: Sequence[Call], *, has_failed: bool) -> None:
    """Raises EngineError or UnavailableError when they failed the last call of an agent that `has_failed`, or that got
    no answer at all: such an attempt says nothing about the agent."""
    answered = [call for call in calls if call.delivered is not Delivered.NO]
    if answered and not has_failed:
        return
    failures = await reach(lambda: client.events(rollout.spec.id, "call.error"))
    answered_s = max((call.ended_s for call in answered), default=rollout.started_s or 0.0)
    if failures and failures[-1].timestamp_s > answered_s:
        raise EngineError(f"the engine failed the agent's last model call: {failures[-1].data.get('message')}")
    if (await reach(client.state))["recorded_since_s"] > answered_s:
        raise UnavailableError(
            "the gateway or its store was away after the agent's last answered call; its log has the reason"
        )
