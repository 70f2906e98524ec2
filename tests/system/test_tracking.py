"""A run that TensorBoard and Weights & Biases watch: it is killed, goes on, and loses its watchers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.test_training import ROOT, RUN_FILE, finish, manege, rows, wait_for_steps
from tests.unit.test_writers import steps_in
from tests.wandb_file import offline_runs

OFFLINE = {**os.environ, "WANDB_MODE": "offline"}
SMALL = ["train.groups=2", "train.group_size=4", "tasks.num_heldout=4", "train.checkpoint_every=2"]
WATCHED = ["tracking.tensorboard=true", "tracking.wandb=manege-tests"]


@pytest.mark.timeout(400)
def test_a_run_that_was_killed_has_every_step_once_in_both(tmp_path):
    """Also in one that watches from the second life on: who watches is no setting of the run."""
    folder = tmp_path / "run"
    overrides = [f"folder={folder}", "train.steps=5", *SMALL]
    process = manege("train", RUN_FILE, *overrides, "tracking.wandb=manege-tests", env=OFFLINE)
    wait_for_steps(process, folder, 3)
    process.send_signal(signal.SIGKILL)
    finish(process, 30)
    code, _, err = finish(manege("train", RUN_FILE, *overrides, *WATCHED, "--resume", env=OFFLINE))
    assert code == 0, err
    steps, evaluations = rows(folder, "step"), rows(folder, "evaluation")

    written = steps_in(folder / "tensorboard", "step/reward_mean")
    assert written == [(row["step"], pytest.approx(row["reward_mean"])) for row in steps]
    greedy = steps_in(folder / "tensorboard", "evaluation/T=0/success_rate")
    assert greedy == [
        (row["step"], pytest.approx(row["success_rate"])) for row in evaluations if row["temperature"] == 0
    ]

    [(run_id, project, sent)] = offline_runs(folder)
    assert run_id == (folder / "wandb" / "id.txt").read_text()
    assert project == "manege-tests"
    assert [row["step"] for row in sent if "step/loss" in row] == [row["step"] for row in steps]
    assert sum("evaluation/T=1/success_rate" in row for row in sent) == 2


@pytest.mark.timeout(240)
def test_a_run_goes_on_when_its_watcher_dies(tmp_path):
    """The process that Weights & Biases writes with is killed."""
    folder = tmp_path / "run"
    process = manege(
        "train", RUN_FILE, f"folder={folder}", "train.steps=4", *SMALL, "tracking.wandb=manege-tests", env=OFFLINE
    )
    wait_for_steps(process, folder, 1)
    killed = [pid for pid in children_of(process.pid) if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    code, _, err = finish(process, 200)
    assert code == 0, err
    assert len(rows(folder, "step")) == 4
    assert "a writer of metrics" in err


def children_of(pid):
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


@pytest.mark.parametrize(
    ("package", "override", "extra"),
    [
        ("tensorboard", "tracking.tensorboard=true", "tracking"),
        ("wandb", "tracking.wandb=p", "tracking"),
        ("peft", "train.lora_rank=4", "lora"),
    ],
)
def test_a_missing_package_is_refused_at_start_with_what_installs_it(tmp_path, package, override, extra):
    """In an environment of all packages but that one."""
    everything = tmp_path / "site"
    everything.mkdir()
    for path in Path(next(entry for entry in sys.path if entry.endswith("site-packages"))).iterdir():
        if not path.name.lower().startswith(package):
            (everything / path.name).symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{everything}"}
    program = "import sys; from manege.cli import main; sys.exit(main())"
    command = [sys.executable, "-S", "-c", program, "train", str(RUN_FILE), f"folder={tmp_path / 'run'}", override]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f'pip install "manege[{extra}]"' in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
