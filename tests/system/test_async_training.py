"""Asynchronous training for real: agents as processes, a small model that gets better while others go on sampling."""

import asyncio
import contextlib
import re
import subprocess
import sys
from itertools import pairwise

import httpx
import pytest

from manege.config import load_config
from manege.store.reading import StoreReader
from tests.system.test_training import ROOT, RUN_FILE, finish, manege, rows

ASYNC = ["train.schedule=async", "train.groups=4", "train.async_groups=10", "train.max_staleness=3", "train.steps=14"]


def stored_calls(folder):
    """Of the rollouts that were trained."""
    groups = {group for row in rows(folder, "step") for group in row["groups"]}

    async def read():
        reader = await StoreReader.open(folder / "manege.db")
        try:
            ended = (await reader.terminal(run="tiny", after=0, limit=10000)).rollouts
            rollouts = [each for each in ended if each.spec.group in groups]
            calls = await reader.calls([each.spec.id for each in rollouts])
            return [call for each in calls.values() for call in each]
        finally:
            await reader.close()

    return asyncio.run(read())


def check(folder, *, most):
    """What holds for every asynchronous training."""
    steps = rows(folder, "step")
    successes = [row["success_rate"] for row in steps]
    assert sum(successes[-3:]) / 3 >= max(0.6, successes[0] + 0.2)
    assert max(row["staleness_max"] for row in steps) <= most
    assert any(row["staleness_max"] > 0 for row in steps)
    versions = [row["policy_version"] for row in steps]
    assert versions == sorted(set(versions))
    assert all(row["carried_over"] > 0 for row in steps[:-3])
    used = [group for row in steps for group in row["groups"]]
    assert len(used) == len(set(used))
    return steps


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "inflight",
    ["abort_continue", pytest.param("drain", marks=pytest.mark.full), pytest.param("keep", marks=pytest.mark.full)],
)
def test_reward_rises_with_samples_of_older_versions(tmp_path, inflight):
    folder = tmp_path / "run"
    code, _, err = finish(manege("train", RUN_FILE, f"folder={folder}", *ASYNC, f"train.inflight={inflight}"), 290)
    assert code == 0, err
    steps = check(folder, most=3)
    distances = {distance for row in steps for distance in row["gap_by_distance"]}
    assert {"0", "1"} <= distances <= {"0", "1", "2", "3"}
    # The versions of the tokens are those that sampled them: under the same weights nothing differs.
    same = [row["gap_by_distance"]["0"]["max"] for row in steps if "0" in row["gap_by_distance"]]
    assert inflight == "keep" or max(same) < 1e-3
    assert max(row["gap_by_distance"]["1"]["max"] for row in steps if "1" in row["gap_by_distance"]) > 1e-2
    spans = [call.spans for call in stored_calls(folder) if len(call.spans) > 1]
    assert all(before.version < after.version for each in spans for before, after in pairwise(each))
    if inflight == "drain":
        assert not spans
    else:
        assert spans, "no answer was under way at any update"
        assert all(each[-1].old_cache == (inflight == "keep") for each in spans)


@contextlib.contextmanager
def engine_process():
    """`manege engine` over the tiny model; its address."""
    command = "import sys; from manege.cli import main; sys.exit(main())"
    arguments = ["engine", "--model", str(ROOT / "tests" / "tiny" / "model"), "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments], stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        for line in process.stderr:
            if found := re.search(r"http://[\d.:]+", line):
                yield found[0]
                break
        else:
            raise AssertionError("the engine did not start")
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.timeout(300)
@pytest.mark.full
def test_two_engine_processes_serve_while_a_third_process_trains(tmp_path):
    folder = tmp_path / "run"
    with engine_process() as first, engine_process() as second:
        urls = f'gateway.engine_url=["{first}", "{second}"]'
        overrides = [f"folder={folder}", urls, *ASYNC, "train.inflight=abort_continue"]
        code, _, err = finish(manege("train", RUN_FILE, *overrides), 280)
        assert code == 0, err
        served = [httpx.get(f"{url}/weight_info").json()["weight_version"] for url in (first, second)]
    steps = check(folder, most=3)
    assert served == [str(steps[-1]["policy_version"])] * 2
    same = [row["gap_by_distance"]["0"]["max"] for row in steps if "0" in row["gap_by_distance"]]
    assert max(same) < 1e-3
    # The engines go on sampling during the steps, up to the publication at the end of each.
    begun = [call.created_s for call in stored_calls(folder)]
    held = [row["drain_s"] for row in steps]
    assert all(row["update_s"] > drain_s for row, drain_s in zip(steps, held, strict=True))
    during = [
        sum(row["time_s"] - row["update_s"] < each < row["time_s"] - row["update_s"] / 2 for each in begun)
        for row in steps
    ]
    assert sum(number > 0 for number in during) >= len(steps) // 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.async_groups=9"], 'async_groups = 9 does nothing here: it needs schedule = "async"'),
        (["train.staleness_policy=drop"], 'needs schedule = "async"'),
        (["train.schedule=async", "train.async_groups=8"], "more groups than groups = 8 are under way"),
        (
            ["train.schedule=async", "train.async_groups=17", "train.max_staleness=1"],
            "at most (max_staleness + 1) * groups = 16",
        ),
        (["train.inflight=keep", "train.drain_s=3"], 'drain_s = 3.0 does nothing here: it needs inflight = "drain"'),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_schedule_that_cannot_be_is_refused(tmp_path, overrides, message):
    code, _, err = finish(manege("train", RUN_FILE, f"folder={tmp_path / 'run'}", *overrides))
    assert code == 2
    assert message in err


def test_the_default_objective_of_async_is_the_corrected_one():
    """Samples are of older weights there; a run may say otherwise."""
    assert load_config(RUN_FILE).credit.ratio == "recorded"
    assert load_config(RUN_FILE, ["train.schedule=async"]).credit.ratio == "decoupled"
    assert load_config(RUN_FILE, ["train.schedule=async", "credit.ratio=recorded"]).credit.ratio == "recorded"
