"""A training that is interrupted does what it would have done: same tasks, samples and losses, and nothing twice.

The engine answers the same prompt always alike, and an agent's prompt names its task, its group and its member.
"""

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import pytest

from manege.config import parse_config
from manege.engine.scripted import hashed_reply
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.store.base import Ending
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.loop import Trainer
from manege.trainer.metrics import read_metrics
from manege.types import Outcome, Task

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("engine", [hashed_reply(num_tokens=4, first_id=64, last_id=89)], indirect=True, ids=[""]),
]
"""The tiny model's letters."""

FOLDER = open_folder(str(Path(__file__).parents[1] / "tiny" / "model"))
NUM_TASKS = 4
OF_A_LIFE = {
    *("time_s", "train_s", "trainer_idle_s", "update_s", "tokens_per_s", "policy_version"),
    *("gap_by_distance", "gap_mean", "gap_kl", "rollouts_per_s", "rollout_s_mean", "policy_version_last"),
    *("held_calls", "held_s", "engine_idle_s", "unsettled_calls", "staleness_mean", "staleness_max"),
    "staleness_histogram",
}
"""Metrics that tell when a step was done, and how often before. The gaps are sums over versions, of which there are
others."""


def run_config(folder, *, refill=True, **train):
    settings = {"steps": 10, "groups": 2, "group_size": 3, "mini_batches": 2, "learning_rate": 1e-3, "warmup_steps": 4}
    return parse_config(
        {
            "name": folder.name,
            "folder": str(folder),
            "tasks": {"train": "none"},
            "agent": {"run": ["none"]},
            "scorer": {"run": ["none"]},
            "credit": {"zero_variance": "refill", "shuffle_rewards": True} if refill else {},
            "train": settings | {"checkpoint_every": 2} | train,
            "evaluation": {"every": 3, "num_interim": 2},
        }
    )


class Stopped(Exception):
    """As a process is, from one moment to the next."""


class Watcher:
    """An Observer that stops the trainer when it is (`where`, at a step); in a group: after so many rollouts."""

    def __init__(self, where=None, step=None, *, after=1):
        self.stop_at, self.after = (where, step), after
        self.num_steps, self.num_rollouts, self.phase, self.stopped = 0, 0, "", asyncio.Event()

    def on_phase(self, phase):
        self.phase, self.num_rollouts = phase.split()[0], 0
        self.stop_if(self.phase, self.num_steps + (self.phase != "evaluating"))

    def on_row(self, row):
        if row["kind"] == "step":
            self.num_steps += 1
            self.stop_if("checkpointing", self.num_steps)

    def on_rollout(self):
        self.num_rollouts += 1
        here = (self.phase, self.num_rollouts) == ("collecting", self.after)
        if here and self.stop_at == ("in a group", self.num_steps + 1):
            self.stopped.set()

    def stop_if(self, *at):
        if at == self.stop_at:
            raise Stopped


async def live(client, config, watcher, *, resume):
    """One life of a trainer; returns its rows if it came to its end."""
    trainer = Trainer(
        config,
        client,
        TorchEngine(load_model(FOLDER), FOLDER, config.train),
        watcher,
        train_tasks=[Task(id=f"t{index}", input={}) for index in range(NUM_TASKS)],
        heldout_tasks=[Task(id=f"h{index}", input={}) for index in range(3)],
        clock=lambda: 0.0,
        decode=FOLDER.decode,
        resume=resume,
    )
    run = asyncio.create_task(trainer.run())
    stopped = asyncio.create_task(watcher.stopped.wait())
    await asyncio.wait([run, stopped], return_when=asyncio.FIRST_COMPLETED)
    for task in (run, stopped):
        task.cancel()
    with contextlib.suppress(Stopped, asyncio.CancelledError):
        return await run


def asked(rollout_id):
    """The part of an id that does not tell one run from another."""
    return rollout_id.partition("-")[2]


async def carry_out(client, watchers):
    """A controller and its agents, with a verdict; it does not care whether there is a trainer."""
    async with httpx.AsyncClient(base_url=client.url) as http:
        while True:
            for claim in await client.claim(controller="c", limit=1, lease_s=60, wait_s=1):
                spec, words = claim.rollout.spec, []
                for number in range(2):
                    prompt = f"{spec.task.id} {asked(spec.id)} {number}"
                    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4}
                    key = {"authorization": f"Bearer {claim.agent_key}"}
                    answer = await http.post("/v1/chat/completions", json=body, headers=key)
                    words.append(answer.json()["choices"][0]["message"]["content"])
                reward = sum(word < "n" for word in words) / 2
                await client.finish(spec.id, 0, Ending(outcome=Outcome.OK, reward=reward))
                for watcher in watchers:
                    watcher.on_rollout()


@contextlib.asynccontextmanager
async def agents(client, *watchers):
    """At work as long as the context lasts."""
    task = asyncio.create_task(carry_out(client, watchers))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def lives(client, config, *stops):
    """Rows of a training that was stopped so often."""
    watchers = [Watcher(*stop) for stop in stops] + [Watcher()]
    async with agents(client, *watchers):
        for number, watcher in enumerate(watchers):
            rows = await live(client, config, watcher, resume=number > 0)
            assert (rows is None) == (number < len(stops)), f"not stopped: {watcher.stop_at}"
        return rows


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


def of_steps(rows):
    return [row for row in rows if row["kind"] == "step"]


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
    # Agents take what was asked for first.
    assert [asked(group) for group in trained] == ["000002", "000003"]
    assert [group["index"] for group in state["asked"]] == [4]


async def test_a_row_that_a_crash_cut_is_made_again(client, tmp_path):
    config = run_config(tmp_path / "run", steps=2, checkpoint_every=1)
    watcher = Watcher("updating", 2)
    async with agents(client, watcher):
        assert await live(client, config, watcher, resume=False) is None
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "step", "step": 2, "lo')
        rows = await live(client, config, Watcher(), resume=True)
    assert [row["step"] for row in of_steps(rows)] == [1, 2]
