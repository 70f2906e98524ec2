"""What every train engine does the same way; a new engine is a row of ENGINES."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from manege.config import CreditConfig, TrainConfig
from manege.errors import TrainerError
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from tests.calls import ROLLOUTS, merged, weighted

FOLDER = open_folder(str(Path(__file__).parents[1] / "tiny" / "model"))
OBJECTIVE = objective_of(CreditConfig(clip_high=0.28))


def torch_engine(**settings):
    return TorchEngine(load_model(FOLDER), FOLDER, TrainConfig(learning_rate=1e-3, warmup_steps=0, **settings))


ENGINES = {"torch": torch_engine}


@pytest.fixture(params=ENGINES.values(), ids=ENGINES.keys())
def make_engine(request):
    return request.param


@pytest.fixture
def batch():
    return weighted("rollout_mean", merged)


def on_policy(engine, batch):
    """The same batch, as if this engine's weights had sampled it."""
    recorded = engine.logprobs([item.sample for item in batch])
    return [
        dataclasses.replace(item, sample=dataclasses.replace(item.sample, logprobs_M=logprobs))
        for item, logprobs in zip(batch, recorded, strict=True)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_plain_forward_pass_at_the_temperature(make_engine, temperature):
    [sample] = merged(ROLLOUTS[0][1])
    sample = dataclasses.replace(sample, temperature=temperature)
    [got] = make_engine().logprobs([sample])
    model = load_model(FOLDER)
    ids = torch.from_numpy(sample.ids_T).long()
    with torch.no_grad():
        logits = model.logits(model.hidden(ids, torch.arange(len(ids)), causal_attend([len(ids)])))
    table = torch.log_softmax(logits / temperature, -1)
    want = [table[t - 1, ids[t]].item() for t in sample.positions_M]
    assert got == pytest.approx(want, abs=1e-4)


def test_a_step_raises_the_probability_of_what_was_better(make_engine, batch):
    engine = make_engine()
    batch = on_policy(engine, batch)
    samples = [item.sample for item in batch]
    metrics = engine.step(batch, OBJECTIVE).metrics
    after = engine.logprobs(samples)
    assert metrics["gap_max"] < 1e-4
    assert after[0].sum() > samples[0].logprobs_M.sum()
    assert after[1].sum() < samples[1].logprobs_M.sum()


def test_a_broken_gradient_changes_nothing(make_engine, batch):
    engine = make_engine()
    before = engine.logprobs([batch[0].sample])[0]
    with pytest.raises(TrainerError, match="not finite"):
        engine.step([dataclasses.replace(item, weight=float("nan")) for item in batch], OBJECTIVE)
    assert np.array_equal(engine.logprobs([batch[0].sample])[0], before)


def test_a_resumed_engine_goes_on_exactly(make_engine, batch, tmp_path):
    straight, resumed = make_engine(), make_engine()
    straight.step(batch, OBJECTIVE)
    straight.save(tmp_path / "checkpoint")
    straight.step(batch, OBJECTIVE)
    resumed.load(tmp_path / "checkpoint")
    resumed.step(batch, OBJECTIVE)
    samples = [item.sample for item in batch]
    for a, b in zip(straight.logprobs(samples), resumed.logprobs(samples), strict=True):
        assert np.array_equal(a, b)


def test_a_checkpoint_that_is_none_is_refused(make_engine, tmp_path):
    with pytest.raises(TrainerError, match="not a checkpoint"):
        make_engine().load(tmp_path)


def test_an_export_is_what_was_trained_and_loads_in_transformers(make_engine, batch, tmp_path):
    engine = make_engine()
    engine.step(batch, OBJECTIVE)
    engine.export(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    sample = batch[0].sample
    ids = torch.from_numpy(sample.ids_T).long()
    with torch.no_grad():
        table = torch.log_softmax(theirs(ids[None]).logits[0], -1)
    want = [table[t - 1, ids[t]].item() for t in sample.positions_M]
    assert engine.logprobs([sample])[0] == pytest.approx(want, abs=1e-4)


def test_weights_are_published_in_memory_or_as_a_folder(batch, tmp_path):
    assert torch_engine().publish().kind == "shared"
    engine = TorchEngine(load_model(FOLDER), FOLDER, TrainConfig(learning_rate=1e-3), publish_folder=tmp_path)
    engine.step(batch, OBJECTIVE)
    weights = engine.publish()
    reader = TorchEngine(load_model(open_folder(weights.folder)), FOLDER, TrainConfig())
    sample = batch[0].sample
    assert reader.logprobs([sample])[0] == pytest.approx(engine.logprobs([sample])[0], abs=1e-5)
