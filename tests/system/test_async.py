"""The asynchronous schedule through a real gateway: stragglers, restarts, evaluations beside training, the end.

See tests/lives.py for what there is around it. Which agents are slow is said by the index of their group.
"""

import asyncio
import contextlib
import json
import threading
import time

import pytest

from manege.trainer.engines.torch import TorchEngine
from manege.trainer.metrics import read_metrics
from manege.types import Outcome
from tests import lives
from tests.lives import FOLDER, LETTERS, Watcher, asked, by_member, live, load_model, of_steps, run_config

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("engine", [LETTERS], indirect=True, ids=[""]),
]


def agents(client, *watchers, **options):
    return lives.agents(client, *watchers, reward=by_member, slots=16, **options)


def async_config(folder, **train):
    return run_config(
        folder,
        **{"schedule": "async", "groups": 1, "async_groups": 2, "max_staleness": 2, "steps": 6} | train,
    )


class Straggler:
    """The agents of one group go on only when they are let."""

    def __init__(self, *groups):
        self.groups = {f"{group:06d}" for group in groups}
        self.let, self.reached = asyncio.Event(), asyncio.Event()

    async def __call__(self, spec):
        if asked(spec.group) in self.groups:
            self.reached.set()
            await self.let.wait()


async def until(condition, what):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


def indices(row):
    return [int(asked(group)) for group in row["groups"]]


@contextlib.asynccontextmanager
async def training(client, config, watcher, **options):
    """A trainer at work; its rows are the result of the task."""
    task = asyncio.create_task(live(client, config, watcher, resume=False, **options))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_training_goes_on_beside_a_straggler_and_waits_when_it_would_be_too_old(client, tmp_path):
    straggler, watcher = Straggler(0), Watcher()
    config = async_config(tmp_path / "run")
    async with asyncio.timeout(60), agents(client, between=straggler), training(client, config, watcher) as trained:
        # Two steps without group 0, which has tokens of version 0 and must be trained by version 2.
        await until(lambda: watcher.num_steps == 2, "two steps")
        state = await client.state(run="run")
        while state["rollouts"]["running"] > 3:
            await asyncio.sleep(0.01)
            state = await client.state(run="run")
        await asyncio.sleep(0.3)
        assert (watcher.num_steps, watcher.phase) == (2, "collecting")
        straggler.let.set()
        steps = of_steps(await trained)
    assert [indices(row) for row in steps[:3]] == [[1], [2], [0]]
    assert (steps[0]["staleness_max"], steps[2]["staleness_max"]) == (0, 2)
    assert max(row["staleness_max"] for row in steps) == 2
    assert [row["policy_version"] for row in steps] == list(range(1, 7))
    assert [row["carried_over"] for row in steps[:5]] == [1] * 5
    assert steps[1]["carried_age_max"] == 1
    used = [index for row in steps for index in indices(row)]
    assert sorted(used) == list(range(6)), "each group once, and none asked for that is not trained"


async def test_with_drop_the_straggler_is_cut_off_and_training_never_waits(client, tmp_path):
    straggler, config = Straggler(0), async_config(tmp_path / "run", staleness_policy="drop", max_dropped_fraction=0.5)
    async with agents(client, between=straggler), asyncio.timeout(60):
        rows = await live(client, config, Watcher(), resume=False)
        steps = of_steps(rows)
        straggler.let.set()
    assert len(steps) == 6
    assert max(row["staleness_max"] for row in steps) <= 2
    assert 0 not in [index for row in steps for index in indices(row)]
    assert [(row["dropped_groups"], row["dropped_rollouts"]) for row in steps if row["dropped_groups"]] == [(1, 3)]
    [dropped] = [row for row in steps if row["dropped_groups"]]
    assert dropped["dropped_s_mean"] > dropped["rollout_s_mean"]
    # What the gateway sampled for it is in the ledger.
    assert dropped["tokens_by_reason"]["replaced"] > 0
    page = await client.terminal(run="run", after=0, limit=1000)
    cut = {asked(each.spec.group) for each in page.rollouts if each.outcome is Outcome.CANCELLED}
    assert cut == {"000000"}


async def test_a_group_that_loses_one_straggler_is_trained_with_the_others(client, tmp_path):
    let = asyncio.Event()

    async def one_member(spec):
        if asked(spec.id) == "000000-1":
            await let.wait()

    config = async_config(tmp_path / "run", staleness_policy="drop", max_dropped_fraction=0.5)
    async with agents(client, between=one_member), asyncio.timeout(60):
        steps = of_steps(await live(client, config, Watcher(), resume=False))
        let.set()
    [row] = [row for row in steps if 0 in indices(row)]
    assert (row["num_verdicts"], row["num_rollouts"], row["dropped_rollouts"], row["dropped_groups"]) == (2, 3, 1, 0)
    assert row["staleness_max"] == 2


async def test_at_the_end_of_a_run_nothing_waits_for_groups_that_no_step_needs(client, tmp_path):
    """A straggler that never ends, a bound that is never reached, and more groups under way than are trained."""
    straggler, watcher = Straggler(0), Watcher()
    config = async_config(tmp_path / "run", async_groups=3, max_staleness=9, steps=4)
    async with asyncio.timeout(60), agents(client, between=straggler), training(client, config, watcher) as trained:
        await until(lambda: watcher.num_steps == 3, "three steps")
        # The last step needs it: nothing else was asked for.
        await straggler.reached.wait()
        straggler.let.set()
        steps = of_steps(await trained)
    assert sorted(index for row in steps for index in indices(row)) == [0, 1, 2, 3]
    assert await client.open_rollouts("run") == []


async def test_a_run_that_stops_early_cancels_what_is_under_way(client, tmp_path):
    straggler = Straggler(0, 5, 6)
    config = async_config(tmp_path / "run", async_groups=4, max_staleness=9, steps=50, stop_success=1e-9)
    async with agents(client, between=straggler), asyncio.timeout(60):
        rows = await live(client, config, Watcher(), resume=False)
        straggler.let.set()
    assert len(of_steps(rows)) < 50
    assert rows[-1]["kind"] == "evaluation", "the last evaluation was made"
    assert await client.open_rollouts("run") == []


def held_out(spec):
    return not spec.is_train


@pytest.mark.parametrize("schedule", ["sync", "async"])
async def test_an_evaluation_runs_beside_training_under_the_versions_that_sampled_it(client, tmp_path, schedule):
    let, began = asyncio.Event(), asyncio.Event()

    async def slow_evaluation(spec):
        if held_out(spec) and "-e000002-" in spec.id:
            began.set()
            await let.wait()

    config = async_config(tmp_path / "run") if schedule == "async" else run_config(tmp_path / "run", groups=1, steps=6)
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": 2})})
    watcher = Watcher()
    async with (
        asyncio.timeout(60),
        agents(client, between=slow_evaluation),
        training(client, config, watcher) as trained,
    ):
        await began.wait()
        if schedule == "sync":
            await asyncio.sleep(0.3)
            assert watcher.num_steps == 2, "training waits"
        else:
            await until(lambda: watcher.num_steps >= 5, "training goes on")
        let.set()
        rows = await trained
    kinds = [(row["kind"], row["step"]) for row in rows if row["step"] in (2, 6)]
    [row] = [row for row in rows if row["kind"] == "evaluation" and row["step"] == 2]
    assert (row["policy_version"], row["num_tasks"]) == (2, 2)
    if schedule == "async":
        assert row["policy_version_last"] >= 5
        assert rows.index(row) > kinds.index(("step", 2))
    else:
        assert row["policy_version_last"] == 2
    assert {row["step"] for row in rows if row["kind"] == "evaluation"} == {0, 2, 4, 6}


async def test_an_evaluation_that_is_not_finished_at_the_end_is_waited_for(client, tmp_path):
    let, watcher = asyncio.Event(), Watcher()

    async def slow_evaluation(spec):
        if "-e000003-" in spec.id:
            await let.wait()

    config = async_config(tmp_path / "run")
    async with (
        asyncio.timeout(60),
        agents(client, between=slow_evaluation),
        training(client, config, watcher) as trained,
    ):
        await until(lambda: watcher.num_steps == 6, "all steps")
        await asyncio.sleep(0.5)
        assert watcher.phase == "updating", "the last evaluation is alone"
        let.set()
        rows = await trained
    assert [row["step"] for row in rows if row["kind"] == "evaluation"][-3:] == [3, 6, 6]


class Slow(TorchEngine):
    """A trainer that is slower than its agents."""

    def step(self, batch, objective):
        time.sleep(0.2)
        return super().step(batch, objective)


async def test_an_evaluation_that_was_under_way_is_found_again_after_a_restart(client, tmp_path):
    let = asyncio.Event()

    async def slow_evaluation(spec):
        if "-e000002-" in spec.id:
            await let.wait()

    config = async_config(tmp_path / "run", checkpoint_every=1)
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": 2})})
    async with agents(client, between=slow_evaluation), asyncio.timeout(60):
        assert await live(client, config, Watcher("updating", 5), resume=False) is None
        let.set()
        rows = await live(client, config, Watcher(), resume=True)
    [row] = [row for row in rows if row["kind"] == "evaluation" and row["step"] == 2]
    assert (row["policy_version"], row["num_tasks"]) == (2, 2)
    assert {row["step"] for row in rows if row["kind"] == "evaluation"} == {0, 2, 4, 6}


async def test_a_resumed_run_that_is_told_to_evaluate_does_not_evaluate_its_past(client, tmp_path):
    config = async_config(tmp_path / "run", checkpoint_every=1)
    seldom, often = (
        config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": every})})
        for every in (None, 1)
    )
    async with agents(client), asyncio.timeout(60):
        assert await live(client, seldom, Watcher("updating", 4), resume=False) is None
        rows = await live(client, often, Watcher(), resume=True)
    assert {row["step"] for row in rows if row["kind"] == "evaluation"} == {0, 3, 4, 5, 6}


class Held(TorchEngine):
    """A trainer whose steps end when they are let."""

    reached: threading.Event
    let: threading.Event

    def step(self, batch, objective):
        self.reached.set()
        assert self.let.wait(timeout=30)
        return super().step(batch, objective)


@pytest.mark.parametrize(("schedule", "num_asked"), [("async", 3), ("sync", 1)])
async def test_the_next_agents_start_during_an_update_unless_the_schedule_is_sync(
    client, tmp_path, schedule, num_asked
):
    config = async_config(tmp_path / "run") if schedule == "async" else run_config(tmp_path / "run", groups=1, steps=2)
    engine = Held(load_model(FOLDER), FOLDER, config.train)
    engine.reached, engine.let = threading.Event(), threading.Event()
    async with asyncio.timeout(60), agents(client), training(client, config, Watcher(), engine=engine) as trained:
        await asyncio.to_thread(engine.reached.wait)
        states = (await client.state(run="run"))["rollouts"]
        # Six of the evaluations before training.
        assert sum(states.values()) - 6 == num_asked * 3
        assert (await client.state())["paused"]
        engine.let.set()
        await trained


@pytest.mark.parametrize("slower", ["agents", "trainer"])
@pytest.mark.parametrize("policy", ["wait", "drop"])
async def test_a_run_comes_to_its_end_whoever_is_slower(client, tmp_path, slower, policy):
    async def work(spec):
        await asyncio.sleep(0.1 * (1 + int(spec.id[-1])) if slower == "agents" else 0)

    config = async_config(tmp_path / "run", groups=2, async_groups=6, steps=12, staleness_policy=policy)
    engine = (Slow if slower == "trainer" else TorchEngine)(load_model(FOLDER), FOLDER, config.train)
    async with agents(client, between=work), asyncio.timeout(100):
        steps = of_steps(await live(client, config, Watcher(), resume=False, engine=engine))
    assert len(steps) == 12
    assert max(row["staleness_max"] for row in steps) <= 2
    versions = [row["policy_version"] for row in steps]
    assert versions == sorted(versions)
    assert {row["num_rollouts"] for row in steps} == {6}


STOPS = [
    ("collecting", 1),
    ("updating", 2),
    ("checkpointing", 3),
    ("updating", 5),
    ("collecting", 6),
    ("checkpointing", 8),
    ("collecting", 9),
    ("updating", 10),
]


async def test_the_bound_holds_over_restarts_and_versions_only_grow(client, tmp_path):
    config = async_config(tmp_path / "run", groups=2, async_groups=5, steps=10, checkpoint_every=2)
    watchers = [Watcher(*stop) for stop in STOPS] + [Watcher()]
    published = []

    async def work(spec):
        await asyncio.sleep(0.02 * (int(asked(spec.group)[-1], 16) % 5) if spec.is_train else 0)

    async with agents(client, *watchers, between=work), asyncio.timeout(150):
        for number, watcher in enumerate(watchers):
            rows = await live(client, config, watcher, resume=number > 0)
            assert (rows is None) == (number < len(STOPS)), f"not stopped: {watcher.stop_at}"
            metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
            published.append([row["policy_version"] for row in metrics if row["kind"] == "step"])
    steps = of_steps(rows)
    assert [row["step"] for row in steps] == list(range(1, 11))
    assert max(row["staleness_max"] for row in steps) <= 2
    assert all(versions == sorted(set(versions)) for versions in published)
    # In this lineage of weights every group was trained once at most.
    used = [group for row in steps for group in (*row["groups"], *row["replaced"])]
    assert len(used) == len(set(used))
    # What was asked for and is in no step is no longer open.
    assert await client.open_rollouts("run") == []


async def test_groups_that_a_restart_made_too_old_are_not_trained(client, tmp_path):
    config = async_config(tmp_path / "run", steps=2, checkpoint_every=1)
    watcher = Watcher("checkpointing", 1)
    async with agents(client, watcher):
        assert await live(client, config, watcher, resume=False) is None
    path = tmp_path / "run" / "checkpoints" / "step-000001" / "trainer.json"
    left = [group["index"] for group in json.loads(path.read_text())["asked"]] if path.exists() else []
    for _ in range(3):
        # Each life publishes its weights once more.
        stopped = Watcher("collecting", 1)
        assert await live(client, config, stopped, resume=True) is None
    async with agents(client), asyncio.timeout(60):
        steps = of_steps(await live(client, config, Watcher(), resume=True))
    assert max(row["staleness_max"] for row in steps) <= 2
    assert sum(row["dropped_groups"] for row in steps) >= 1, f"carried over: {left}"
