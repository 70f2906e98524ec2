"""The same batch through the torch engine and through verl, on one rank and two: one loss, one gradient, one model."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from manege.config import CreditConfig, TrainConfig
from manege.model.load import load_model
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from tests.calls import merged, split, weighted
from tests.verl.worker.conftest import LEARNING_RATE, MODEL

pytestmark = pytest.mark.verl

PPO = objective_of(CreditConfig(clip_high=0.28))
DECOUPLED = dataclasses.replace(PPO, ratio="decoupled", mismatch_cap=1.1, mismatch_band=1.3)
OBJECTIVES = {
    "ppo": PPO,
    "cispo": dataclasses.replace(PPO, loss="cispo"),
    "gspo": dataclasses.replace(PPO, loss="gspo", clip_low=0.02, clip_high=0.03),
    "decoupled": DECOUPLED,
    "decoupled by call": dataclasses.replace(DECOUPLED, mismatch_level="call"),
    "kl": dataclasses.replace(PPO, kl=0.1),
}
BATCHES = {
    "rollout_mean": ("rollout_mean", merged),
    "token_mean": ("token_mean", merged),
    "constant": ("constant", merged),
    "sample_mean": ("sample_mean", merged),
    "samples of one call each": ("rollout_mean", split),
}
NAMES = ("loss", "grad_norm", "clip_fraction", "masked_fraction", "mismatch_weight_mean", "entropy", "gap_mean")


def torch_engine(**settings):
    config = TrainConfig(learning_rate=LEARNING_RATE, **{"warmup_steps": 0, "prefix_tree": False, **settings})
    return TorchEngine(load_model(MODEL), MODEL, config, reference=True)


def near_policy(engine, batch, seed=0):
    """As if policies near this engine's had sampled the batch, some tokens outside the clip, and begun the update."""
    rng = np.random.default_rng(seed)
    present = engine.logprobs([item.sample for item in batch])

    def near(logprobs, scale):
        return logprobs + rng.normal(0, scale, len(logprobs)).astype(np.float32)

    return [
        dataclasses.replace(
            item,
            sample=dataclasses.replace(item.sample, logprobs_M=near(logprobs, 0.3)),
            proximal_M=near(logprobs, 0.1),
        )
        for item, logprobs in zip(batch, present, strict=True)
    ]


def check(theirs, ours):
    for name in NAMES:
        assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_loss_has_the_same_value_and_gradient(group, name):
    ours = torch_engine()
    batch = near_policy(ours, weighted("rollout_mean", merged))
    first = group.engine(reference=True).step(batch, OBJECTIVES[name]).metrics
    check(first, expected := ours.step(batch, OBJECTIVES[name]).metrics)
    assert expected["grad_norm"] > 1e-3
    assert name != "kl" or first["kl_reference"] == pytest.approx(expected["kl_reference"], abs=1e-6)


@pytest.mark.parametrize("name", BATCHES)
def test_every_weighting_has_the_same_value_and_gradient(group, name):
    ours = torch_engine()
    batch = near_policy(ours, weighted(*BATCHES[name]))
    check(group.engine().step(batch, PPO).metrics, ours.step(batch, PPO).metrics)


def test_each_sample_has_its_own_temperature(group):
    def heated(batch):
        heats = [0.6, 1.0, 1.3, 0.8]
        return [
            dataclasses.replace(item, sample=dataclasses.replace(item.sample, temperature=heat))
            for item, heat in zip(batch, heats, strict=True)
        ]

    ours = torch_engine()
    batch = near_policy(ours, heated(weighted("rollout_mean", merged)))
    check(group.engine().step(batch, PPO).metrics, ours.step(batch, PPO).metrics)


def test_a_batch_of_fewer_samples_than_ranks_is_a_step(group):
    ours = torch_engine()
    batch = near_policy(ours, weighted("rollout_mean", merged))[:1]
    check(group.engine().step(batch, PPO).metrics, ours.step(batch, PPO).metrics)


def test_after_ten_updates_the_weights_are_the_same(group, tmp_path):
    """With warm-up and a KL term."""
    objective, settings = dataclasses.replace(DECOUPLED, kl=0.05), {"warmup_steps": 3}
    ours, theirs = torch_engine(**settings), group.engine(reference=True, **settings)
    before = {name: parameter.detach().clone() for name, parameter in ours._model.module.named_parameters()}
    for seed in range(10):
        batch = near_policy(ours, weighted("rollout_mean", merged), seed)
        expected = ours.step(batch, objective).metrics
        got = theirs.step(batch, objective).metrics
        assert got["learning_rate"] == expected["learning_rate"]
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-2, abs=1e-4)
    theirs.export(tmp_path / "model")
    after = weights(tmp_path / "model")
    assert after.keys() == before.keys()
    for name, parameter in ours._model.module.named_parameters():
        assert torch.allclose(after[name], parameter.detach(), atol=1e-3, rtol=0), name
        assert not torch.allclose(before[name], parameter.detach(), atol=2e-3, rtol=0), name


def weights(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_checkpoint_of_all_ranks_goes_on_exactly(group, tmp_path):
    """Optimiser, warm-up and all; in ranks that have trained something else meanwhile."""
    batch = near_policy(torch_engine(), weighted("rollout_mean", merged))
    engine = group.engine(warmup_steps=3)
    engine.step(batch, PPO)
    engine.save(tmp_path / "checkpoint")
    straight = engine.step(batch, PPO).metrics
    engine.export(tmp_path / "straight")
    for seed in range(2):
        engine.step(near_policy(engine, weighted("token_mean", merged), seed), PPO)
    engine.load(tmp_path / "checkpoint")
    assert engine.step(batch, PPO).metrics == straight
    engine.export(tmp_path / "resumed")
    first, second = weights(tmp_path / "straight"), weights(tmp_path / "resumed")
    assert all(torch.equal(first[name], second[name]) for name in first)
