"""Training on two ranks of this machine through all parts: the command line, both ranks serving, one of them killed."""

import json
import os
import re
import signal
import time
import urllib.request

import psutil
import pytest

from tests.system.test_training import RUN_FILE, finish, manege, rows, wait_for_steps

TWO = ("backend.ranks_per_node=2", "model.device=cpu", "evaluation.temperatures=[]")
SMALL = ("train.groups=2", "train.group_size=4")


def ranks_of(process):
    """Its rank processes."""
    return [child for child in psutil.Process(process.pid).children() if "manege.cli.rank" in child.cmdline()]


def engine_url(rank):
    """Where a rank serves: the first socket that it opened. Those by which ranks talk are on the loopback, too."""
    listening = [each for each in rank.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert {each.laddr.ip for each in listening} == {"127.0.0.1"}
    return f"http://127.0.0.1:{min(listening, key=lambda each: each.fd).laddr.port}"


def get(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def num_running(url):
    return float(re.search(r"^vllm:num_requests_running (\S+)$", get(f"{url}/metrics"), re.MULTILINE)[1])


@pytest.fixture
def start(tmp_path):
    """Starts runs; what a failed test leaves is ended."""
    processes = []

    def start(*arguments):
        processes.append(manege("train", RUN_FILE, f"folder={tmp_path / 'run'}", *TWO, *arguments))
        return processes[-1]

    yield start
    for process in processes:
        with process:
            process.kill()


@pytest.mark.timeout(600)
@pytest.mark.full
def test_two_ranks_learn_and_serve(start, tmp_path):
    folder = tmp_path / "run"
    process = start("train.steps=6")
    wait_for_steps(process, folder, 1, timeout_s=200)
    [rank] = ranks_of(process)
    url, seen, versions = engine_url(rank), 0.0, set()
    while process.poll() is None and len(rows(folder, "step")) < 5:
        seen = max(seen, num_running(url))
        versions.add(int(json.loads(get(f"{url}/weight_info"))["weight_version"]))
        time.sleep(0.02)
    code, _, err = finish(process, timeout_s=400)
    assert code == 0, err
    assert seen > 0
    assert {2, 3} <= versions
    steps = rows(folder, "step")
    successes = [row["success_rate"] for row in steps]
    assert sum(successes[-2:]) / 2 >= successes[0] + 0.15
    # A rank that served other weights than it trains would be far off.
    assert all(row["gap_max"] < 1e-3 for row in steps)
    assert [row["policy_version"] for row in steps] == list(range(1, len(steps) + 1))
    assert not rank.is_running()


@pytest.mark.timeout(400)
def test_a_run_that_loses_a_rank_ends_and_goes_on(start, tmp_path):
    folder = tmp_path / "run"
    settings = (*SMALL, "train.checkpoint_every=1", "train.steps=3")
    process = start(*settings)
    wait_for_steps(process, folder, 1)
    [rank] = ranks_of(process)
    os.kill(rank.pid, signal.SIGKILL)
    code, _, err = finish(process, timeout_s=60)
    assert code == 2, err
    assert "rank 1 ended with exit code -9; go on from the last checkpoint with --resume" in err
    num_done = len(rows(folder, "step"))
    code, _, err = finish(start(*settings, "--resume"))
    assert code == 0, err
    assert [row["step"] for row in rows(folder, "step")] == [1, 2, 3]
    assert num_done < 3


@pytest.mark.timeout(200)
def test_ranks_die_with_a_trainer_that_is_killed(start, tmp_path):
    process = start(*SMALL)
    wait_for_steps(process, tmp_path / "run", 1)
    [rank] = ranks_of(process)
    process.kill()
    process.communicate()
    psutil.wait_procs([rank], timeout=10)
    assert not rank.is_running()
