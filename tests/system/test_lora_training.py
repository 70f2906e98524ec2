"""Adapters through all parts: the command line trains them, the reward rises, and what it leaves can be used."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import TINY_MODEL
from tests.system.test_training import RUN_FILE, finish, manege, rows


@pytest.mark.full
@pytest.mark.timeout(900)
def test_reward_rises_with_adapters_over_weights_that_stay(tmp_path):
    """Over two lives: the second goes on from the first one's checkpoint."""
    folder = tmp_path / "run"
    overrides = [f"folder={folder}", "train.lora_rank=8", "train.learning_rate=5e-3", "tasks.num_heldout=32"]
    overrides += ["credit.kl=0.001", "train.stop_success=0.8"]
    code, _, err = finish(manege("train", RUN_FILE, *overrides, "train.steps=5"), 390)
    assert code == 0, err
    code, out, err = finish(manege("train", RUN_FILE, *overrides, "train.steps=20", "--resume", "--allow-changes"), 600)
    assert code == 0, err
    steps = rows(folder, "step")
    successes = [row["success_rate"] for row in steps]
    assert successes[0] <= 0.5
    assert sum(successes[-3:]) / 3 >= 0.75
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    assert all(row["gap_max"] < 1e-3 for row in steps)
    assert steps[0]["kl_reference"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["kl_reference"] > 0.001

    base, trained = (load_file(path / "model.safetensors") for path in (TINY_MODEL, folder / "model"))
    assert {name for name in base if not np.array_equal(base[name], trained[name])} == {
        name for name in base if "_proj" in name
    }
    adapter = json.loads((folder / "model" / "adapter" / "adapter_config.json").read_text())
    assert adapter["r"] == 8
    code, out, err = finish(
        manege("eval", RUN_FILE, f"model.path={folder / 'model'}", "tasks.num_heldout=32", "--json")
    )
    assert code == 0, err
    assert json.loads(out.splitlines()[0])["success_rate"] >= 0.75


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lora_rank=4", "train.frozen=['embed']"], "with adapters lora_targets says what is trained"),
        (["train.lora_rank=4", "train.lora_targets=['query']"], "no linear layer 'query'"),
    ],
)
def test_adapters_that_cannot_be_are_refused_in_one_line(tmp_path, overrides, message):
    code, _, err = finish(manege("train", RUN_FILE, f"folder={tmp_path / 'run'}", *overrides))
    lines = [line for line in err.splitlines() if "WARNING" not in line]
    assert code == 2
    assert len(lines) == 1, err
    assert message in lines[0]
