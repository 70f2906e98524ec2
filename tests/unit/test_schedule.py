"""Which groups a step trains on, and that a group is what its id says, whatever ends first."""

import random

import pytest

from manege.store.base import Ending
from manege.trainer.collect import Group, GroupFeed
from manege.trainer.schedule import SyncSchedule
from manege.types import Outcome, Rollout, RolloutId, RolloutSpec, RolloutState, Task

pytestmark = pytest.mark.anyio


def group_of(index):
    task = Task(id=str(index), input={})
    spec = RolloutSpec(id=f"g-{index:06d}-0", run="run", task=task, group=f"g-{index:06d}")
    rollout = Rollout(spec=spec, state=RolloutState.SUCCEEDED, attempt=0, created_s=0)
    return Group(task=task, rollouts=[rollout], calls=[[]])


class Tasks:
    """Groups that end in some order; a group is worth training on if its task says so."""

    def __init__(self, worth, order=None):
        self.worth, self.order = worth, order
        self.open, self.num_started = [], 0

    async def start(self):
        self.open.append(group_of(self.num_started))
        self.num_started += 1

    async def next(self):
        return self.open.pop(self.order.randrange(len(self.open)) if self.order else 0)

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


@pytest.mark.parametrize("worth", [[True], [True, False, False, True, True, False], [False], [False] * 5 + [True]])
async def test_what_a_step_trains_does_not_depend_on_the_order_of_completion(worth):
    steps = []
    for seed in range(30):
        tasks = Tasks(worth, random.Random(seed) if seed else None)
        schedule = SyncSchedule(tasks.start, tasks.next, 3, keep=tasks.keep)
        drawn = [await schedule.next_batch() for _ in range(3)]
        steps.append([(ids(each.groups), ids(each.replaced)) for each in drawn])
        assert not tasks.open
    assert all(each == steps[0] for each in steps)
    used = [index for groups, replaced in steps[0] for index in (*groups, *replaced)]
    assert sorted(used) == list(range(tasks.num_started))


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
