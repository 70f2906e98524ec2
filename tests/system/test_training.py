"""Training for real: the command line, a gateway on a socket, agents as processes, a small model that gets better."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN_FILE = ROOT / "tests" / "tiny" / "run.toml"


def manege(*arguments, stdin=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=None):
    command = [sys.executable, "-c", "import sys; from manege.cli import main; sys.exit(main())", *map(str, arguments)]
    files = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    return subprocess.Popen(command, cwd=ROOT, **files, env=env, text=True, encoding="utf-8")


def finish(process, timeout_s=300):
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def rows(folder, kind):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def wait_for_steps(process, folder, num_steps, timeout_s=100):
    """Until that many steps are in the metrics file."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"ended early: {process.communicate()}")
        if (folder / "metrics.jsonl").exists() and len(rows(folder, "step")) >= num_steps:
            return
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"{num_steps} steps did not come: {process.communicate()}")


def descendants_of(folder):
    """Processes whose environment or command line names this run folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and int(pid) != os.getpid():
            found.append(int(pid))
    return found


@pytest.mark.timeout(400)
def test_reward_rises_through_all_parts(tmp_path):
    folder = tmp_path / "run"
    code, out, err = finish(manege("train", RUN_FILE, f"folder={folder}"))
    assert code == 0, err
    steps, evaluations = rows(folder, "step"), rows(folder, "evaluation")
    successes = [row["success_rate"] for row in steps]
    assert successes[0] <= 0.5
    assert sum(successes[-3:]) / 3 >= 0.75
    before, after = (row for row in evaluations if row["temperature"] == 1.0)
    assert after["low"] > before["high"]
    assert all(row["samples_per_rollout"] == 1.0 for row in steps)
    assert all(row["gap_max"] < 1e-3 for row in steps)
    assert all(row["unique_ratio"] < 0.6 for row in steps)
    assert [row["policy_version"] for row in steps] == list(range(1, len(steps) + 1))
    assert "held-out success, T = 1" in out
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "curve.svg").read_text()

    code, out, err = finish(manege("eval", RUN_FILE, f"model.path={folder / 'model'}", "--json"))
    assert code == 0, err
    again = [json.loads(line) for line in out.splitlines()]
    assert [row["temperature"] for row in again] == [1.0, 0.0]
    assert again[0]["success_rate"] >= 0.75
    code, out, err = finish(manege("run", RUN_FILE, f"model.path={folder / 'model'}", "--temperature", "0"))
    assert code == 0, err
    assert "model: get " in out
    assert "outcome ok, reward 1" in out


@pytest.mark.full
@pytest.mark.timeout(400)
def test_shuffled_rewards_teach_nothing(tmp_path):
    folder = tmp_path / "run"
    code, _, err = finish(manege("train", RUN_FILE, f"folder={folder}", "credit.shuffle_rewards=true"), 390)
    assert code == 0, err
    successes = [row["success_rate"] for row in rows(folder, "step")]
    assert sum(successes[-3:]) / 3 <= successes[0] + 0.15


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.full)], ids=["ctrl-c", "kill -9"]
)
def test_a_stopped_run_leaves_no_agent_and_goes_on_where_it_was(tmp_path, number):
    folder = tmp_path / "run"
    overrides = [f"folder={folder}", "train.checkpoint_every=2", "train.steps=6", "tasks.num_heldout=8"]
    process = manege("train", RUN_FILE, *overrides)
    wait_for_steps(process, folder, 3)
    process.send_signal(number)
    stopped = time.monotonic()
    code, out, err = finish(process, 30)
    assert time.monotonic() - stopped < 10
    if number is signal.SIGINT:
        assert code == 130, err
        assert "--resume" in out
    deadline = time.monotonic() + 5
    while (left := descendants_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left

    first = rows(folder, "step")
    code, _, err = finish(manege("train", RUN_FILE, *overrides, "seed=5", "--resume"))
    assert code == 2
    assert "seed: 0 -> 5" in err
    code, _, err = finish(manege("train", RUN_FILE, *overrides, "--resume"))
    assert code == 0, err
    steps = rows(folder, "step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[:2] == first[:2]
    versions = [row["policy_version"] for row in steps]
    assert versions == sorted(set(versions))
    assert len(rows(folder, "evaluation")) == 4


@pytest.mark.timeout(240)
def test_the_default_recipe_trains_a_few_steps(tmp_path):
    folder = tmp_path / "run"
    run_file = ROOT / "src" / "manege" / "recipes" / "finder" / "run.toml"
    overrides = [f"folder={folder}", "train.steps=2", "tasks.num_heldout=4", "train.checkpoint_every=2"]
    code, _, err = finish(manege("train", run_file, *overrides), 230)
    assert code == 0, err
    steps = rows(folder, "step")
    assert len(steps) == 2
    assert all(row["gap_max"] < 1e-3 and row["samples_per_rollout"] == 1.0 for row in steps)
    assert all(row["num_calls"] > row["num_rollouts"] for row in steps)
    assert {row["temperature"] for row in rows(folder, "evaluation")} == {1.0, 0.0}


def test_two_trainings_cannot_share_a_run_folder(tmp_path):
    folder = tmp_path / "run"
    first = manege("train", RUN_FILE, f"folder={folder}")
    wait_for_steps(first, folder, 1)
    code, _, err = finish(manege("train", RUN_FILE, f"folder={folder}"))
    first.send_signal(signal.SIGINT)
    finish(first, 30)
    assert code == 2
    assert "is in use by another manege process" in err
    code, _, err = finish(manege("train", RUN_FILE, f"folder={folder}"))
    assert code == 2
    assert "already holds a run; go on with --resume" in err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.setps=3"], "did you mean 'train.steps'"),
        (["tasks.train=no.jsonl"], "no.jsonl cannot be read"),
        (['agent.run=["no-such-agent"]'], "command 'no-such-agent' does not exist"),
        (["agent.run=no_module:main"], "module 'no_module' cannot be imported"),
        (["scorer.run=tiny_tasks:no"], "has no function 'no'"),
        (["model.path=no-such-folder"], "no-such-folder"),
        (["model.max_context=100000"], "at most 256 tokens"),
        (["sandbox.mode=off"], "--unsafe"),
        (["train.frozen=['nothing']"], "no parameter's name contains 'nothing'"),
        (['agent.env={ X = "{nothing}" }'], "nothing"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_in_one_line_before_anything_runs(tmp_path, overrides, message):
    code, _, err = finish(manege("train", RUN_FILE, f"folder={tmp_path / 'run'}", *overrides))
    lines = [line for line in err.splitlines() if "WARNING" not in line]
    assert code == 2
    assert len(lines) == 1, err
    assert message in lines[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['agent.run=["true"]'], "made no model call"),
        (['scorer.run=["echo", "nonsense"]'], "the scorer's verdict is 'nonsense'"),
    ],
    ids=["agent without calls", "scorer without verdicts"],
)
def test_training_on_nothing_stops_with_a_diagnosis(tmp_path, overrides, message):
    folder = tmp_path / "run"
    code, _, err = finish(manege("train", RUN_FILE, f"folder={folder}", "tasks.num_heldout=2", *overrides))
    assert code == 2
    assert message in err
    assert not (folder / "metrics.jsonl").exists() or not rows(folder, "step")
