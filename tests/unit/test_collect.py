"""A group is what its id says, whatever ends first, and is found again by it."""

import pytest

from manege.store.base import Ending
from manege.trainer.collect import GroupFeed
from manege.types import Outcome, RolloutId, Task

pytestmark = pytest.mark.anyio


async def test_groups_are_keyed_by_id_whatever_the_order_of_completion(client):
    feed = GroupFeed(client, "run", cursor=0, reward_from="scorer", max_attempts=1)
    for name in ("a", "b", "c"):
        await feed.start(Task(id=name, input={}), size=2, is_train=True, temperature=1.0)
    claims = await client.claim(controller="c", limit=6, lease_s=30)
    by_task = {name: [c.rollout for c in claims if c.rollout.spec.task.id == name] for name in ("a", "b", "c")}
    order = [("c", 1), ("a", 1), ("b", 0), ("c", 0), ("b", 1), ("a", 0)]
    for reward, (name, member) in enumerate(order):
        await client.finish(
            RolloutId(by_task[name][member].spec.id), 0, Ending(outcome=Outcome.OK, reward=float(reward))
        )
    groups = [await feed.next_group() for _ in range(3)]
    assert [group.task.id for group in groups] == ["c", "b", "a"]
    assert [[rollout.reward for rollout in group.rollouts] for group in groups] == [[3, 0], [2, 4], [5, 1]]
    for group in groups:
        assert len({rollout.spec.group for rollout in group.rollouts}) == 1


async def ask(client, cursor, *names):
    feed = GroupFeed(client, "run", cursor=cursor, reward_from="scorer", max_attempts=1)
    for name in names:
        await feed.start(Task(id=name, input={}), group=name, size=2, is_train=True, temperature=1.0)
    return feed


async def end(client, rollout_id, reward):
    await client.finish(RolloutId(rollout_id), 0, Ending(outcome=Outcome.OK, reward=reward))


@pytest.mark.parametrize("cursor", ["the start", "the end"])
async def test_a_group_that_is_asked_for_again_is_found_as_it_is(client, cursor):
    """Members that ended before are neither waited for nor counted twice, wherever the feed is read from."""
    await ask(client, 0, "a", "b", "c")
    await client.claim(controller="c", limit=6, lease_s=30)
    for rollout_id in ("b-1", "b-0", "a-1"):
        await end(client, rollout_id, 1.0)
    num_ended = (await client.terminal(run="run", after=0, limit=1)).num_ended
    assert num_ended == 3
    feed = await ask(client, 0 if cursor == "the start" else num_ended, "a", "b", "c")
    assert len((await client.terminal(run="run", after=0)).rollouts) == 3
    assert len(await client.open_rollouts("run")) == 3
    for rollout_id in ("c-0", "a-0", "c-1"):
        await end(client, rollout_id, 0.0)
    groups = [await feed.next_group() for _ in range(3)]
    assert [group.id for group in groups] == ["b", "a", "c"]
    assert [[rollout.reward for rollout in group.rollouts] for group in groups] == [[1, 1], [0, 1], [0, 0]]
