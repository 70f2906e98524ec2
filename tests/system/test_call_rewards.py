"""Rewards of single calls on their way from the scorer to the trainer."""

import json

import pytest

from manege.errors import ConflictError, UnprocessableError
from manege.store.base import Ending
from manege.trainer.collect import GroupFeed
from manege.types import Outcome, Task
from tests.system.test_controller import QUESTION, controlling, run_config, run_one, settle, spec

pytestmark = pytest.mark.anyio

COMMAND = "import json, sys; calls = json.load(sys.stdin)['attempt']['calls'];"
COMMAND += "print(json.dumps({'reward': 0.5, 'calls': {calls[1]['id']: 3}}))"


def feed(client, *, call_rewards=True):
    return GroupFeed(client, "run", cursor=0, reward_from="scorer", max_attempts=1, call_rewards=call_rewards)


async def next_group(client, folder, config, groups):
    await client.put_run("run", config.model_dump(mode="json"))
    task = Task(id="t", input=QUESTION | {"earned": [1, -0.25]})
    async with controlling(client, folder):
        await groups.start(task, size=2, is_train=True, temperature=1.0)
        return await groups.next_group()


@pytest.mark.parametrize(
    ("scorer", "rewards"), [("score_calls", [1.0, -0.25]), (["python", "-c", COMMAND], [None, 3.0])]
)
async def test_what_a_scorer_says_of_calls_reaches_the_trainer(client, tmp_path, scorer, rewards):
    group = await next_group(client, tmp_path, run_config("ask_twice", scorer), feed(client))
    assert [rollout.reward for rollout in group.rollouts] == [0.5, 0.5]
    for calls, earned in zip(group.calls, group.call_rewards, strict=True):
        assert [earned.get(call.id) for call in calls] == rewards


async def test_rewards_of_calls_are_not_fetched_where_nothing_uses_them(client, tmp_path):
    group = await next_group(client, tmp_path, run_config("ask_twice", "score_calls"), feed(client, call_rewards=False))
    assert list(group.call_rewards) == []


async def test_a_scorer_that_rewards_calls_of_nobody_is_at_fault(client, tmp_path):
    rollout = await run_one(client, tmp_path, run_config("ask_once", "score_strangers"))
    assert (rollout.outcome, rollout.reward) == (Outcome.INFRA_ERROR, None)
    assert "call 'nobody', which this attempt did not make" in rollout.message


async def test_an_end_posted_twice_leaves_its_rewards_once(client, tmp_path):
    await client.put_run("run", run_config("ask_once").model_dump(mode="json"))
    async with controlling(client, tmp_path):
        await settle(client, spec())
    (call,) = (await client.calls(["r1"]))["r1"]
    ending = Ending(outcome=Outcome.OK, reward=1.0, call_rewards={call.id: 1.0})
    with pytest.raises(ConflictError):
        await client.finish("r1", 0, ending)
    assert await client.events("r1", "call_reward") == []


async def test_an_end_with_rewards_of_unknown_calls_ends_nothing(client, store):
    await client.create_rollouts([spec()])
    await client.claim(controller="c", limit=1, lease_s=30)
    with pytest.raises(UnprocessableError, match="attempt 0 of rollout r1 has no call 'nobody'"):
        await client.finish("r1", 0, Ending(outcome=Outcome.OK, reward=1.0, call_rewards={"nobody": 1.0}))
    assert (await store.get_rollout("r1")).outcome is None


async def test_a_reward_of_a_call_is_a_finite_number_on_the_wire(gateway, client):
    await client.create_rollouts([spec()])
    await client.claim(controller="c", limit=1, lease_s=30)
    for value in ("1", True, None):
        with pytest.raises(UnprocessableError, match=r"call_rewards\.a"):
            await client.finish("r1", 0, Ending(outcome=Outcome.OK, reward=1.0, call_rewards={"a": value}))
    assert json.dumps((await client.get_rollout("r1")).outcome) == "null"
