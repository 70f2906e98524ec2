"""Training for real with verl: the command line, Ray, two ranks, an engine server that takes the weights as folders."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.system.test_training import RUN_FILE, descendants_of, finish, manege, rows, wait_for_steps

pytestmark = pytest.mark.verl

BACKEND = ["backend.kind=verl", "backend.ranks_per_node=2", "backend.engines.kind=manege", "backend.engines.count=1"]


def ranks_of(parent):
    """Pids of the workers of that process's Ray."""
    children = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append((int(pid), command))
    found, waiting = [], [parent]
    while waiting:
        for pid, command in children.get(waiting.pop(), []):
            waiting.append(pid)
            if command.startswith("ray::RankWorker"):
                found.append(pid)
    return found


@pytest.mark.timeout(1500)
def test_reward_rises_though_a_rank_is_killed_on_the_way(tmp_path):
    folder = tmp_path / "run"
    command = ["train", RUN_FILE, f"folder={folder}", *BACKEND, "train.checkpoint_every=2"]
    process = manege(*command)
    wait_for_steps(process, folder, 3, timeout_s=400)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 2, err
    assert "rank 0 (127.0.0.2) of 2 died" in err
    assert "--resume" in err
    deadline = time.monotonic() + 30
    while (left := descendants_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left

    code, _, err = finish(manege(*command, "--resume"), timeout_s=900)
    assert code == 0, err
    steps, evaluations = rows(folder, "step"), rows(folder, "evaluation")
    successes = [row["success_rate"] for row in steps]
    assert successes[0] <= 0.5
    assert sum(successes[-3:]) / 3 >= 0.75
    assert all(row["gap_max"] < 1e-3 for row in steps)
    before, after = (row for row in evaluations if row["temperature"] == 1.0)
    assert after["low"] > before["high"]
