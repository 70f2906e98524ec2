"""A training that is interrupted does what it would have done: same tasks, samples and losses, and nothing twice.

See tests/lives.py for what there is around it.
"""

import asyncio
import json

import pytest

from manege.trainer.metrics import read_metrics
from manege.types import Outcome
from tests import lives as harness
from tests.lives import LETTERS, NUM_TASKS, Watcher, agents, asked, live, lives, of_steps

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("engine", [LETTERS], indirect=True, ids=[""]),
]
OF_A_LIFE = {
    *("time_s", "train_s", "trainer_idle_s", "update_s", "tokens_per_s", "policy_version"),
    *("gap_by_distance", "gap_mean", "gap_kl", "rollouts_per_s", "rollout_s_mean", "policy_version_last"),
    *("held_calls", "held_s", "drain_s", "engine_idle_s", "unsettled_calls", "staleness_mean", "staleness_max"),
    "staleness_histogram",
}
"""Metrics that tell when a step was done, and how often before. The gaps are sums over versions, of which there are
others."""


def run_config(folder, *, refill=True, **train):
    credit = {"zero_variance": "refill", "shuffle_rewards": True} if refill else {}
    return harness.run_config(folder, credit=credit, **{"mini_batches": 2} | train)


async def sampled(client, run):
    """Of every rollout, by what was asked: its outcome and the tokens of its calls."""
    page = await client.terminal(run=run, after=0, limit=1000)
    calls = await client.calls([rollout.spec.id for rollout in page.rollouts])
    assert not await client.open_rollouts(run)
    return {
        asked(rollout.spec.id): (
            rollout.spec.task.id,
            (rollout.outcome, rollout.reward, rollout.attempt),
            [(list(call.prompt_ids_P), list(call.response_ids_R)) for call in calls[rollout.spec.id]],
        )
        for rollout in page.rollouts
    }


def comparable(rows):
    rows = [{name: value for name, value in row.items() if name not in OF_A_LIFE} for row in rows]
    for row in rows:
        for name in {"groups", "replaced"} & set(row):
            row[name] = [asked(group) for group in row[name]]
    return rows


STOPS = [
    ("evaluating", 0),
    ("collecting", 1),
    ("updating", 1),
    ("in a group", 2),
    ("checkpointing", 3),
    ("evaluating", 3),
    ("updating", 4),
    ("checkpointing", 4),
    ("in a group", 5),
    ("collecting", 6),
    ("evaluating", 6),
    ("updating", 7),
    ("in a group", 8),
    ("checkpointing", 9),
    ("updating", 10),
    ("checkpointing", 10),
    ("evaluating", 10),
]


async def test_a_training_that_is_stopped_at_every_step_is_the_same_training(client, tmp_path):
    straight = await lives(client, run_config(tmp_path / "straight"))
    stopped = await lives(client, run_config(tmp_path / "stopped"), *STOPS)
    assert len(of_steps(straight)) == 10
    assert any(row["replaced"] for row in of_steps(straight))
    assert len({row["loss"] for row in of_steps(straight)}) == 10
    assert comparable(stopped) == comparable(straight)
    assert await sampled(client, "stopped") == await sampled(client, "straight")
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("straight", "stopped")]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    used = [group for row in of_steps(stopped) for group in (*row["groups"], *row["replaced"])]
    page = await client.terminal(run="stopped", after=0, limit=1000)
    assert len(used) == len(set(used))
    assert set(used) == {rollout.spec.group for rollout in page.rollouts if rollout.spec.is_train}
    # Two groups a step on four tasks, so many a step begins with an epoch.
    assert {index // NUM_TASKS for index in range(len(used))} > {0, 1, 2, 3, 4}
    versions = [row["policy_version"] for row in of_steps(stopped)]
    assert versions == sorted(set(versions))


async def test_unfinished_rollouts_go_on_while_the_trainer_is_away(client, tmp_path):
    config = run_config(tmp_path / "run", refill=False, steps=1)
    # The fourth one is of the second group.
    watcher, again = Watcher("in a group", 1, after=4), Watcher("checkpointing", 1)
    async with agents(client, watcher), asyncio.timeout(30):
        assert await live(client, config, watcher, resume=False) is None
        while await client.open_rollouts("run"):
            await asyncio.sleep(0.01)
    # Nobody carries anything out any more: all that the step needs is there.
    async with asyncio.timeout(30):
        await live(client, config, again, resume=True)
    assert again.num_steps == 1


async def test_a_finished_run_ends_at_once_with_its_rows_or_trains_on_for_more_steps(client, tmp_path):
    rows = await lives(client, run_config(tmp_path / "run", steps=2))
    async with asyncio.timeout(30):
        assert await live(client, run_config(tmp_path / "run", steps=2), Watcher(), resume=True) == rows
    async with agents(client):
        more = await live(client, run_config(tmp_path / "run", steps=4), Watcher(), resume=True)
    assert more[: len(rows)] == rows
    assert [row["step"] for row in of_steps(more)] == [1, 2, 3, 4]


async def test_under_another_config_nothing_of_the_old_one_is_taken_for_the_new(client, tmp_path):
    watcher = Watcher("in a group", 2)
    async with agents(client, watcher):
        assert await live(client, run_config(tmp_path / "run", steps=2), watcher, resume=False) is None
    left = {rollout.spec.id for rollout in await client.open_rollouts("run")}
    assert left
    changed, again = run_config(tmp_path / "run", steps=2, group_size=2), Watcher()
    run = asyncio.create_task(live(client, changed, again, resume=True))
    while not (again.phase or run.done()):
        await asyncio.sleep(0.01)
    async with agents(client):
        rows = await run
    assert {row["num_rollouts"] for row in of_steps(rows)} == {2 * 2}
    page = await client.terminal(run="run", after=0, limit=1000)
    assert left == {rollout.spec.id for rollout in page.rollouts if rollout.outcome is Outcome.CANCELLED}
    used = {group for row in of_steps(rows) for group in (*row["groups"], *row["replaced"])}
    assert not used & {rollout_id.rpartition("-")[0] for rollout_id in left}


async def test_a_new_trainer_lets_a_gateway_go_on_that_a_dead_one_left_paused(client, tmp_path):
    await client.pause()
    async with asyncio.timeout(30):
        rows = await lives(client, run_config(tmp_path / "run", steps=1))
    assert len(of_steps(rows)) == 1


async def test_groups_that_a_schedule_carried_over_are_asked_for_again(client, tmp_path):
    def checkpoint(step):
        return tmp_path / "run" / "checkpoints" / f"step-{step:06d}" / "trainer.json"

    await lives(client, run_config(tmp_path / "run", refill=False, steps=1))
    state = json.loads(checkpoint(1).read_text())
    assert (state["tasks_taken"], state["asked"]) == (2, [])
    checkpoint(1).write_text(json.dumps(state | {"tasks_taken": 3, "asked": [{"index": 2, "policy_version": 1}]}))
    async with agents(client):
        await live(client, run_config(tmp_path / "run", refill=False, steps=2), watcher := Watcher(), resume=True)
    assert watcher.num_steps == 2
    state = json.loads(checkpoint(2).read_text())
    trained = of_steps(read_metrics(tmp_path / "run" / "metrics.jsonl"))[1]["groups"]
    assert [asked(group) for group in trained] == ["000002", "000003"]
    assert (state["tasks_taken"], state["asked"]) == (4, [])


async def test_a_row_that_a_crash_cut_is_made_again(client, tmp_path):
    config = run_config(tmp_path / "run", steps=2, checkpoint_every=1)
    watcher = Watcher("updating", 2)
    async with agents(client, watcher):
        assert await live(client, config, watcher, resume=False) is None
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "step", "step": 2, "lo')
        rows = await live(client, config, Watcher(), resume=True)
    assert [row["step"] for row in of_steps(rows)] == [1, 2]
