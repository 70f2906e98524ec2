"""A real agent trained through vLLM servers that the run starts."""

import os

import pytest

from tests.system.test_training import ROOT, RUN_FILE, descendants_of, finish, manege, rows
from tests.vllm.serving import PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


def test_an_agent_is_trained_through_vllm(tmp_path):
    folder = tmp_path / "run"
    overrides = [
        f"folder={folder}",
        "train.steps=3",
        "train.groups=4",
        "train.group_size=4",
        "train.learning_rate=1e-3",
        "tasks.num_heldout=4",
        "backend.engines.kind=vllm",
        "backend.engines.count=1",
        f"backend.engines.python={PYTHON}",
        "backend.engines.options.max_num_seqs=16",
        "backend.weights=transfer",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "tiny")}
    code, _, err = finish(manege("train", RUN_FILE, *overrides, env=environment), timeout_s=1400)
    assert code == 0, err
    steps = rows(folder, "step")
    # Version 1 are the weights that the trainer began with.
    assert [row["policy_version"] for row in steps] == [2, 3, 4]
    assert all(row["gap_mean"] < 1e-4 and row["gap_max"] < 1e-3 for row in steps)
    assert all(row["samples_per_rollout"] == 1.0 and row["grad_norm"] > 0 for row in steps)
    log = (folder / "engines" / "engine-0.log").read_text()
    posts = [line.split('"')[1].split()[1] for line in log.splitlines() if '"POST /' in line and "weight" in line]
    transfer = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    assert posts == 4 * [f"/{path}" for path in transfer]
    assert not (folder / "weights").exists()
    assert log.count("/inference/v1/generate") > 3 * 16
    assert not descendants_of(folder)
