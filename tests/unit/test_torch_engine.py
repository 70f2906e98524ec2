"""The update depends on rollouts, not on how they fall apart: gradients of a real (tiny) model in float64."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from manege.config import TrainConfig
from manege.errors import TrainerError
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.trainer.algo.weights import sample_weights
from manege.trainer.engines.base import WeightedSample
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import Objective
from tests.calls import make_call

FOLDER = open_folder(str(Path(__file__).parents[1] / "tiny" / "model"))
OBJECTIVE = Objective(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
HEAD = [1, 2, 3, 4, 5, 6]


def make_engine(*, dtype=torch.float64, **settings):
    return TorchEngine(load_model(FOLDER, dtype=dtype), FOLDER, TrainConfig(**settings))


def linear_rollout(name, turns):
    """One conversation; every turn continues the last."""
    calls, stream = [], list(HEAD)
    for number, (prompt, response) in enumerate(turns):
        stream += prompt
        calls.append(make_call(f"{name}{number}", stream, response, rollout=name, logprobs=[-3.0] * len(response)))
        stream = stream + response
    return calls


ROLLOUTS = [
    (1.0, linear_rollout("a", [([10, 11], [20, 21]), ([12], [22, 23, 24])])),
    (-0.5, linear_rollout("b", [([10, 11], [20, 30]), ([13, 14], [31])])),
    (-0.5, linear_rollout("c", [([10, 40], [41])])),
    (0.0, linear_rollout("d", [([50], [51, 52])])),
]


def split(calls):
    """The same calls as samples of their own, one per call, each with its full context."""
    return [build_samples(build_forest([call]))[0][0] for call in calls]


def merged(calls):
    return list(build_samples(build_forest(calls))[0])


def weighted(rule, cut, rollouts=ROLLOUTS):
    samples = [cut(calls) for _, calls in rollouts]
    weights = sample_weights(samples, rule, constant_tokens=16)
    return [
        WeightedSample(sample=s, advantages_T=np.full(len(s.ids_T), advantage, np.float32), weight=w)
        for (advantage, _), row, ws in zip(rollouts, samples, weights, strict=True)
        for s, w in zip(row, ws, strict=True)
    ]


def gradient(engine, batch):
    """What `step` accumulates, before clipping."""
    for indices in engine._micro_batches([item.sample for item in batch]):
        engine._backward([batch[i] for i in indices], OBJECTIVE)
    grads = [p.grad for p in engine._parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads]).clone()
    engine._optimizer.zero_grad(set_to_none=True)
    return flat


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.mark.parametrize("rule", ["rollout_mean", "token_mean", "constant"])
def test_splitting_a_rollout_leaves_the_gradient_alone(engine, rule):
    a, b = gradient(engine, weighted(rule, merged)), gradient(engine, weighted(rule, split))
    assert a.norm() > 0
    assert relative(b, a) < 1e-6


def test_sample_level_weighting_depends_on_the_split(engine):
    a, b = gradient(engine, weighted("sample_mean", merged)), gradient(engine, weighted("sample_mean", split))
    assert relative(b, a) > 1e-2


def test_order_of_samples_and_of_completion_leaves_the_gradient_alone(engine):
    batch = weighted("rollout_mean", merged)
    other = weighted("rollout_mean", merged, rollouts=ROLLOUTS[::-1])
    assert relative(gradient(engine, other), gradient(engine, batch)) < 1e-6


@pytest.mark.parametrize("tokens", [1, 12, 20, 4096])
@pytest.mark.parametrize("prefix_tree", [True, False])
def test_micro_batches_and_prefix_tree_leave_the_gradient_alone(engine, tokens, prefix_tree):
    batch = weighted("rollout_mean", split)
    other = make_engine(micro_batch_tokens=tokens, prefix_tree=prefix_tree)
    assert relative(gradient(other, batch), gradient(engine, batch)) < 1e-6


def test_two_data_parallel_halves_add_up(engine):
    batch = weighted("rollout_mean", split)
    halves = gradient(engine, batch[::2]) + gradient(engine, batch[1::2])
    assert relative(halves, gradient(engine, batch)) < 1e-6


def test_prefix_tree_computes_shared_tokens_once():
    batch = weighted("rollout_mean", split)
    with_tree = make_engine().step(batch, OBJECTIVE)
    without = make_engine(prefix_tree=False).step(batch, OBJECTIVE)
    assert with_tree["unique_tokens"] < 0.6 * without["unique_tokens"]
    assert with_tree["loss"] == pytest.approx(without["loss"], rel=1e-9)
    assert with_tree["grad_norm"] == pytest.approx(without["grad_norm"], rel=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_plain_forward_pass_at_the_temperature(engine, temperature):
    [sample] = merged(ROLLOUTS[0][1])
    sample = dataclasses.replace(sample, temperature=temperature)
    [got] = engine.logprobs([sample])
    model = load_model(FOLDER, dtype=torch.float64)
    ids = torch.from_numpy(sample.ids_T).long()
    with torch.no_grad():
        logits = model.logits(model.hidden(ids, torch.arange(len(ids)), causal_attend([len(ids)])))
    table = torch.log_softmax(logits / temperature, -1)
    want = [table[t - 1, ids[t]].item() if sample.mask_T[t] else 0.0 for t in range(len(ids))]
    assert got == pytest.approx(want, abs=1e-5)


def test_a_step_raises_the_probability_of_what_was_better():
    engine = make_engine(dtype=torch.float32, learning_rate=1e-3, warmup_steps=0)
    batch = weighted("rollout_mean", merged)
    samples = [item.sample for item in batch]
    before = engine.logprobs(samples)
    batch = [
        dataclasses.replace(item, sample=dataclasses.replace(item.sample, logprobs_T=old))
        for item, old in zip(batch, before, strict=True)
    ]
    metrics = engine.step(batch, OBJECTIVE)
    after = engine.logprobs(samples)
    assert metrics["gap_max"] < 1e-5
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()


def test_frozen_parameters_stay_as_they_were():
    engine = make_engine(frozen=["embed_tokens"], learning_rate=1e-2)
    model = engine._model.module
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.step(weighted("rollout_mean", merged), OBJECTIVE)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert not any("embed_tokens" in name for name in changed)
    assert any("q_proj" in name or "qkv" in name for name in changed)


def test_freezing_an_unknown_name_is_refused():
    with pytest.raises(TrainerError, match="embedding"):
        make_engine(frozen=["embedding"])


def test_a_broken_gradient_changes_nothing():
    engine = make_engine()
    before = [p.detach().clone() for p in engine._parameters]
    batch = [dataclasses.replace(item, weight=float("nan")) for item in weighted("rollout_mean", merged)]
    with pytest.raises(TrainerError, match="not finite"):
        engine.step(batch, OBJECTIVE)
    assert all(torch.equal(p, old) for p, old in zip(engine._parameters, before, strict=True))


def test_a_resumed_engine_goes_on_exactly(tmp_path):
    batch = weighted("rollout_mean", merged)
    straight = make_engine(dtype=torch.float32, learning_rate=1e-3)
    straight.step(batch, OBJECTIVE)
    straight.save(tmp_path / "checkpoint")
    straight.step(batch, OBJECTIVE)
    resumed = make_engine(dtype=torch.float32, learning_rate=1e-3)
    resumed.load(tmp_path / "checkpoint")
    resumed.step(batch, OBJECTIVE)
    for a, b in zip(straight._parameters, resumed._parameters, strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_that_is_none_is_refused(tmp_path):
    with pytest.raises(TrainerError, match="not a checkpoint"):
        make_engine().load(tmp_path)
