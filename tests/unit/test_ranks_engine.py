"""Data-parallel ranks are processes of their own, over gloo; together they are the train engine that one would be."""

import dataclasses

import numpy as np
import pytest
import torch

from manege.config import CreditConfig
from manege.errors import TrainerError
from manege.model.load import load_model
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from manege.trainer.update import run_update
from tests.calls import HEAD, make_call, merged, split, weighted
from tests.rank_runs import FOLDER, config_of, started

OBJECTIVE = objective_of(CreditConfig(clip_high=0.28))
WITH_KL = dataclasses.replace(OBJECTIVE, kl=0.1)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """One engine for many tests: each compares it with a twin that has the same weights."""
    config = config_of(3, micro_batch_tokens=16)
    with started(tmp_path_factory.mktemp("ranks"), config) as (_, engine, model, _):
        yield engine, model, config


@pytest.fixture
def both(three, tmp_path):
    """The ranks' engine with its model, and one alone that is the same so far."""
    engine, model, config = three
    twin_model = load_model(FOLDER)
    twin = TorchEngine(twin_model, FOLDER, config.train, reference=True)
    engine.save(tmp_path / "same")
    twin.load(tmp_path / "same")
    return engine, twin, model, twin_model


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()])


def assert_alike(model, twin_model, start):
    """The way from `start` is the same, but for rounding."""
    moved = (flat(twin_model) - start).norm()
    assert moved > 0
    assert (flat(model) - flat(twin_model)).norm() < 1e-3 * moved


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_steps_of_three_ranks_are_those_of_one(both, loss):
    engine, twin, model, twin_model = both
    start = flat(model)
    objective = dataclasses.replace(WITH_KL, loss=loss)
    for cut in (merged, split, merged, split):
        batch = weighted("rollout_mean", cut)
        ours, theirs = engine.step(batch, objective), twin.step(batch, objective)
        for name in ("loss", "grad_norm", "trained_tokens", "total_tokens", "clip_fraction", "entropy", "kl_reference"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-5, abs=1e-7), name
        assert ours.gap_by_version.keys() == theirs.gap_by_version.keys()
    assert engine.publish().kind == "shared"
    assert_alike(model, twin_model, start)


def test_logprobs_come_back_in_the_order_of_the_samples(both):
    engine, twin, *_ = both
    samples = [item.sample for item in weighted("rollout_mean", split)][::-1]
    for ours, theirs in zip(engine.logprobs(samples), twin.logprobs(samples), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert engine.logprobs([]) == []


@pytest.mark.parametrize("number", [1, 2])
def test_ranks_without_a_sample_take_part(both, number):
    engine, twin, model, twin_model = both
    start = flat(model)
    batch = weighted("rollout_mean", merged)[:number]
    ours, theirs = engine.step(batch, OBJECTIVE), twin.step(batch, OBJECTIVE)
    assert ours.metrics["grad_norm"] == pytest.approx(theirs.metrics["grad_norm"], rel=1e-5)
    assert_alike(model, twin_model, start)


def test_a_step_that_is_not_finite_on_one_rank_changes_no_rank(both):
    engine, twin, model, twin_model = both
    start = flat(model)
    batch = weighted("rollout_mean", merged)
    for index in range(len(batch)):
        broken = [
            dataclasses.replace(item, weight=float("nan")) if i == index else item for i, item in enumerate(batch)
        ]
        with pytest.raises(TrainerError, match="not finite"):
            engine.step(broken, OBJECTIVE)
        assert torch.equal(flat(model), start)
    engine.publish()
    assert engine.step(batch, OBJECTIVE).metrics["grad_norm"] == pytest.approx(
        twin.step(batch, OBJECTIVE).metrics["grad_norm"], rel=1e-5
    )
    assert_alike(model, twin_model, start)


def test_steps_that_belong_together_are_undone_on_all_ranks(both):
    engine, twin, model, twin_model = both
    start = flat(model)
    batch = weighted("rollout_mean", merged)
    broken = [dataclasses.replace(item, weight=float("nan")) for item in batch]
    with pytest.raises(TrainerError, match="not finite"):
        run_update(engine, [batch, broken], OBJECTIVE)
    assert torch.equal(flat(model), start)
    for each in (engine, twin):
        run_update(each, [batch, batch], dataclasses.replace(OBJECTIVE, ratio="decoupled"))
    engine.publish()
    assert_alike(model, twin_model, start)


@pytest.mark.parametrize(("id", "said"), [(7, "first token of a sample"), (99_999, "IndexError")])
def test_a_share_that_cannot_be_computed_is_an_error_everywhere(both, id, said):
    engine, twin, model, twin_model = both
    start = flat(model)
    batch = weighted("rollout_mean", merged)
    [sample] = merged([make_call("x", HEAD, [id])])
    if id == 7:
        span = dataclasses.replace(sample.spans[0], start=0, stop=1)
        sample = dataclasses.replace(sample, spans=[span])
    wrong = dataclasses.replace(batch[0], sample=sample, advantages_M=np.ones(1, np.float32))
    with pytest.raises(TrainerError, match=rf"rank \d failed: .*{said}"):
        engine.step([*batch, wrong], OBJECTIVE)
    assert torch.equal(flat(model), start)
    for each in (engine, twin):
        each.step(batch, OBJECTIVE)
    engine.publish()
    assert_alike(model, twin_model, start)


def test_a_checkpoint_is_loaded_by_all_ranks(both, tmp_path):
    engine, _, model, _ = both
    batch = weighted("rollout_mean", merged)
    engine.save(tmp_path / "checkpoint")
    engine.step(batch, OBJECTIVE)
    once = flat(model)
    engine.load(tmp_path / "checkpoint")
    engine.publish()
    engine.step(batch, OBJECTIVE)
    engine.publish()
    assert torch.equal(flat(model), once)
