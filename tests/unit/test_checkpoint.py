"""What a checkpoint holds, which one a run goes on from, and that none gives way before the next is whole."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from manege.config import CreditConfig, TrainConfig
from manege.errors import TrainerError
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.checkpoint import (
    AskedGroup,
    TrainerState,
    latest_checkpoint,
    load_checkpoint,
    remove_unfinished,
    save_checkpoint,
)
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from tests.calls import merged, weighted

FOLDER = open_folder(str(Path(__file__).parents[1] / "tiny" / "model"))
STATE = TrainerState(
    nonce="01234567",
    config_hash="f00d",
    step=1,
    tasks_taken=9,
    asked=[AskedGroup(index=7, policy_version=3), AskedGroup(index=8, policy_version=4, oldest=3)],
    policy_version=4,
    train_s=1.5,
    successes=[0.25, 0.5],
    evaluating=[2],
)


class Slip:
    """A train engine whose weights are one line; `before_save` is called when half of it is written."""

    def __init__(self, before_save=lambda folder: None):
        self.loaded, self.before_save = None, before_save

    def save(self, folder):
        folder.mkdir()
        (folder / "weights").write_text("half")
        self.before_save(folder.parent)
        (folder / "weights").write_text("whole")

    def load(self, folder):
        self.loaded = (folder / "weights").read_text()


def save(folder, step, *, num_kept=2, before_save=lambda folder: None):
    return save_checkpoint(folder, Slip(before_save), dataclasses.replace(STATE, step=step), num_kept=num_kept)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def at(checkpoint):
    engine = Slip()
    state = load_checkpoint(checkpoint, engine)
    assert engine.loaded == "whole"
    return state


def test_transformers_loads_a_checkpoint_as_it_is(tmp_path):
    engine = TorchEngine(model := load_model(FOLDER), FOLDER, TrainConfig(learning_rate=1e-2))
    engine.step(weighted("rollout_mean", merged), objective_of(CreditConfig()))
    checkpoint = save_checkpoint(tmp_path, engine, STATE, num_kept=1)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint)
    trained = dict(model.module.named_parameters())
    assert all(torch.equal(trained[name], value) for name, value in theirs.named_parameters())
    start = dict(load_model(FOLDER).module.named_parameters())
    assert not all(torch.equal(start[name], value) for name, value in theirs.named_parameters())
    ids = FOLDER.tokenizer.encode("get a").ids
    assert AutoTokenizer.from_pretrained(checkpoint)("get a", add_special_tokens=False)["input_ids"] == ids


def test_what_was_written_is_read(tmp_path):
    assert at(save(tmp_path, 1)) == STATE


def test_the_newest_ones_are_kept_by_number(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, num_kept=3)
    assert names(tmp_path) == ["latest", "step-000003", "step-000004", "step-000005"]
    save(tmp_path, 6, num_kept=1)
    assert names(tmp_path) == ["latest", "step-000006"]
    save(tmp_path, 7, num_kept=3)
    assert names(tmp_path) == ["latest", "step-000006", "step-000007"]


@pytest.mark.parametrize("step", [3, 4], ids=["the next step", "the same step again"])
def test_the_one_before_stays_until_the_new_one_is_whole(tmp_path, step):
    save(tmp_path, 3, num_kept=1)
    save(tmp_path, 4, num_kept=2)
    seen = []

    def look(folder):
        assert {"step-000003", "step-000004"} < set(names(folder))
        seen.append(at(latest_checkpoint(folder)).step)

    new = save(tmp_path, step, num_kept=1, before_save=look)
    assert seen == [4]
    assert latest_checkpoint(tmp_path) == new
    assert at(new).step == step
    assert names(tmp_path) == sorted(["latest", new.name])


def test_a_run_that_went_back_forgets_what_came_after(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step, num_kept=3)
    (tmp_path / "latest").write_text("step-000004\n")
    assert latest_checkpoint(tmp_path).name == "step-000004"
    save(tmp_path, 5, num_kept=3)
    assert names(tmp_path) == ["latest", "step-000002", "step-000004", "step-000005"]


@pytest.mark.parametrize("pointer", [None, "", "step-000009\n", "step-0000"], ids=["none", "empty", "wrong", "half"])
def test_without_a_pointer_to_a_whole_one_the_newest_whole_one_counts(tmp_path, pointer):
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, 2)
    save(tmp_path, 4)
    (tmp_path / "step-000006").mkdir()
    if pointer is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_text(pointer)
    assert at(latest_checkpoint(tmp_path)).step == 4


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path):
    save(tmp_path, 2)

    def fail(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(TrainerError, match=r"step-000004 cannot be written: .* free some space"):
        save(tmp_path, 4, before_save=fail)
    assert names(tmp_path) == ["latest", "step-000002"]
    assert at(latest_checkpoint(tmp_path)).step == 2


def test_what_was_left_half_written_is_removed(tmp_path):
    save(tmp_path, 2)
    for name in (".step-000004.partial", "..step-000004.partial-x1", ".step-000001.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("half")
    (tmp_path / ".latest.partial").write_text("st")
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["latest", "step-000002"]
    remove_unfinished(tmp_path / "nothing")


def test_a_checkpoint_of_another_format_or_model_is_refused(tmp_path):
    checkpoint = save(tmp_path, 2)
    with pytest.raises(TrainerError, match="not a checkpoint of this engine"):
        load_checkpoint(checkpoint, TorchEngine(load_model(FOLDER), FOLDER, TrainConfig()))
    path = checkpoint / "trainer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(TrainerError, match="has format 99"):
        load_checkpoint(checkpoint, Slip())
    path.write_text("{")
    with pytest.raises(TrainerError, match="cannot be read"):
        load_checkpoint(checkpoint, Slip())
