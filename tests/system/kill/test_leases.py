"""A controller that comes back says what it holds, and gets the rest of what it had as new attempts."""

import pytest

from manege.types import RolloutSpec, Task

pytestmark = pytest.mark.anyio


async def taken(client, controller, holding=None):
    claims = await client.claim(controller=controller, limit=9, lease_s=600, holding=holding)
    return {(claim.rollout.spec.id, claim.rollout.attempt) for claim in claims}


async def test_what_a_controller_does_not_hold_any_more_is_tried_again_at_once(client):
    specs = [RolloutSpec(id=name, run="run", task=Task(id="t", input={})) for name in ("a", "b", "c")]
    await client.create_rollouts(specs[:2])
    assert await taken(client, "one") == {("a", 0), ("b", 0)}
    await client.create_rollouts(specs[2:])
    assert await taken(client, "other", holding=[]) == {("c", 0)}
    assert await taken(client, "one") == set()
    assert await taken(client, "one", holding=["a"]) == {("b", 1)}
    assert await taken(client, "one", holding=["a", "b"]) == set()
