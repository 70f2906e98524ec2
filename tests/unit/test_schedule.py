"""Which groups a step trains on, and that a group is what its id says, whatever ends first."""

import pytest

from manege.store.base import Ending
from manege.trainer.collect import Group, GroupFeed
from manege.trainer.schedule import SyncSchedule
from manege.types import Outcome, RolloutId, Task

pytestmark = pytest.mark.anyio


class Tasks:
    """Groups that end as soon as they are asked for; a group is worth training on if its task says so."""

    def __init__(self, worth):
        self.worth = worth
        self.open, self.num_started = [], 0

    async def start(self):
        self.open.append(Group(task=Task(id=str(self.num_started), input={}), rollouts=(), calls=()))
        self.num_started += 1

    async def next(self):
        return self.open.pop(0)

    def keep(self, group):
        return self.worth[int(group.task.id) % len(self.worth)]


def ids(groups):
    return [int(group.task.id) for group in groups]


async def test_constant_groups_are_kept_unless_a_run_says_otherwise():
    tasks = Tasks([False])
    drawn = await SyncSchedule(tasks.start, tasks.next, 3).next_batch()
    assert (ids(drawn.groups), ids(drawn.replaced)) == ([0, 1, 2], [])


async def test_a_constant_group_is_replaced_by_the_next_task_until_the_step_is_full():
    tasks = Tasks([True, False, False, True, True, False])
    schedule = SyncSchedule(tasks.start, tasks.next, 3, keep=tasks.keep)
    drawn = await schedule.next_batch()
    assert (ids(drawn.groups), ids(drawn.replaced)) == ([0, 3, 4], [1, 2])
    assert (tasks.num_started, tasks.open) == (5, [])
    drawn = await schedule.next_batch()
    assert (ids(drawn.groups), ids(drawn.replaced)) == ([6, 9, 10], [5, 7, 8])


async def test_replacing_ends_after_two_per_group_and_the_step_takes_what_there_is():
    tasks = Tasks([False])
    drawn = await SyncSchedule(tasks.start, tasks.next, 2, keep=tasks.keep).next_batch()
    assert (ids(drawn.groups), ids(drawn.replaced)) == ([4, 5], [0, 1, 2, 3])
    assert (tasks.num_started, tasks.open) == (6, [])


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
