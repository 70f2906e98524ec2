"""The update depends on rollouts, not on how they fall apart: gradients of a real (tiny) model in float64, on random
forests, for every loss and every weighting that promises it. The sample-level ways are shown to break the promise."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, find, given, settings
from hypothesis import strategies as st

from manege import credit_config
from manege.config import CreditConfig, TrainConfig
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.algo.advantage import sample_advantages
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.losses.combine import token_loss
from manege.trainer.objective import objective_of
from tests.forests import MOVES, as_built, batch_of, credit, divided, play
from tests.ranks import accumulated, two_ranks

FOLDER = open_folder(str(Path(__file__).parents[1] / "tiny" / "model"))
WEIGHTINGS = ["rollout_mean", "token_mean", "constant"]
OBJECTIVES = {
    f"{loss}-{ratio}-{level}": objective_of(CreditConfig(loss=loss, ratio=ratio, mismatch_level=level))
    for loss, ratio, level in credit_config.OBJECTIVES
}
PPO = OBJECTIVES["ppo-recorded-token"]
OBJECTIVES["ppo-kl"] = dataclasses.replace(PPO, kl=0.5)
RANDOM = {"moves": st.lists(MOVES, min_size=1, max_size=4), "seed": st.integers(0, 999)}
HEAVY = 20
"""How many times the examples of a change are tried by `make full`."""
objectives = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())


def examples(number):
    """Of a property; each takes some forward and backward passes."""
    return settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The model is too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_engine(**config):
    """With the model's parameters; the policy has moved away from the reference."""
    model = load_model(FOLDER, dtype=torch.float64)
    engine = TorchEngine(model, FOLDER, TrainConfig(**config), reference=True)
    generator = torch.Generator().manual_seed(0)
    parameters = list(model.module.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return engine, parameters


@functools.cache
def engine_with(**config):
    return make_engine(**config)


def gradient(batch, objective, **config):
    return accumulated(*engine_with(**config), batch, objective)


def rollouts_of(moves, seed, **more):
    return credit([play(str(i), rollout) for i, rollout in enumerate(moves)], engine_with()[0], seed, **more)


def distance(a, b):
    """Relative, and 0 where both are."""
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def check_split(objective, weighting, prefix_tree, moves, seed):
    """Also with advantages per call, as `returns` gives them."""
    rollouts = rollouts_of(moves, seed, per_call=seed % 2 == 0)
    built = gradient(batch_of(rollouts, weighting), objective)
    apart = gradient(batch_of(rollouts, weighting, divided(seed)), objective, prefix_tree=prefix_tree)
    assert distance(apart, built) < 1e-6


SPLIT = {"weighting": st.sampled_from(WEIGHTINGS), "prefix_tree": st.booleans(), **RANDOM}


@objectives
@examples(10)
@given(**SPLIT)
def test_splitting_a_rollout_leaves_the_gradient_alone(objective, weighting, prefix_tree, moves, seed):
    check_split(objective, weighting, prefix_tree, moves, seed)


@pytest.mark.full
@objectives
@examples(10 * HEAVY)
@given(**SPLIT)
def test_splitting_many_rollouts_leaves_the_gradient_alone(objective, weighting, prefix_tree, moves, seed):
    check_split(objective, weighting, prefix_tree, moves, seed)


@objectives
@examples(5)
@given(weighting=st.sampled_from(WEIGHTINGS), **RANDOM)
def test_order_of_samples_and_of_completion_leaves_the_gradient_alone(objective, weighting, moves, seed):
    rollouts, rng = rollouts_of(moves, seed), np.random.default_rng(seed)
    batch = batch_of([rollouts[i] for i in rng.permutation(len(rollouts))], weighting)
    shuffled = [batch[i] for i in rng.permutation(len(batch))]
    assert distance(gradient(shuffled, objective), gradient(batch_of(rollouts, weighting), objective)) < 1e-6


@objectives
@examples(10)
@given(tokens=st.sampled_from([1, 16, 32, 4096]), prefix_tree=st.booleans(), **RANDOM)
def test_micro_batches_and_the_prefix_tree_leave_the_gradient_alone(objective, tokens, prefix_tree, moves, seed):
    batch = batch_of(rollouts_of(moves, seed), "rollout_mean")
    other = gradient(batch, objective, micro_batch_tokens=tokens, prefix_tree=prefix_tree)
    assert distance(other, gradient(batch, objective)) < 1e-6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with two_ranks(tmp_path_factory.mktemp("ranks"), make_engine) as reduced:
        yield reduced


@objectives
@examples(5)
@given(weighting=st.sampled_from(WEIGHTINGS), **RANDOM)
def test_two_data_parallel_ranks_make_the_gradient_of_one(ranks, objective, weighting, moves, seed):
    batch = batch_of(rollouts_of(moves, seed), weighting)
    assert distance(ranks(batch, objective), gradient(batch, objective)) < 1e-6


def plain_gradient(batch, objective):
    """One sample at a time, by the plainest attention: no tree, no packing, no micro-batches."""
    engine, parameters = engine_with()
    for parameter in parameters:
        parameter.grad = None
    for item in batch:
        sample = item.sample
        logprobs_M, reference_M = (plain_logprobs(model, sample) for model in (engine._model, engine._reference))
        lengths = [span.stop - span.start for span in sample.spans]
        tokens = token_loss(
            logprobs_M,
            torch.from_numpy(sample.logprobs_M).double(),
            logprobs_M.detach() if item.proximal_M is None else torch.from_numpy(item.proximal_M).double(),
            torch.from_numpy(item.advantages_M).double(),
            torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            objective,
            reference_M=reference_M.detach(),
        )
        (item.weight * tokens.loss_M.sum()).backward()
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])


def plain_logprobs(model, sample):
    ids_T = torch.from_numpy(sample.ids_T).long()
    hidden_TE = model.hidden(ids_T, torch.arange(len(ids_T)), causal_attend([len(ids_T)]))
    table_TV = torch.log_softmax(model.logits(hidden_TE) / sample.temperature, -1)
    positions_M = torch.from_numpy(sample.positions_M).long()
    return table_TV[positions_M - 1, ids_T[positions_M]]


@objectives
@examples(5)
@given(proximal=st.booleans(), **RANDOM)
def test_the_gradient_is_that_of_one_plain_forward_pass_per_sample(objective, proximal, moves, seed):
    rollouts = rollouts_of(moves, seed)
    batch = batch_of(rollouts, "rollout_mean", proximal=proximal)
    assume(batch)
    assert distance(gradient(batch, objective), plain_gradient(batch, objective)) < 1e-6


def counterexample(batches_differ):
    """A forest on which two batches that should be the same update are not; fails when none is found."""
    strategy = st.tuples(RANDOM["moves"], RANDOM["seed"])
    search = settings(max_examples=50, deadline=None, phases=[Phase.generate], database=None)
    return find(strategy, lambda drawn: batches_differ(*drawn), settings=search)


def test_sample_level_weighting_depends_on_the_split():
    def differs(moves, seed):
        rollouts = rollouts_of(moves, seed)
        built, apart = (batch_of(rollouts, "sample_mean", cut) for cut in (as_built, divided(seed)))
        return distance(gradient(apart, PPO), gradient(built, PPO)) > 0.01

    counterexample(differs)


def test_sample_level_advantages_depend_on_the_split():
    def with_sample_advantages(rollouts, cut, seed):
        samples = [cut(rollout.calls) for rollout in rollouts]
        rewards = np.random.default_rng(seed).normal(size=len(rollouts)).tolist()
        flat = [a for row in sample_advantages(rewards, [len(row) for row in samples], "centred") for a in row]
        return [
            dataclasses.replace(item, advantages_M=np.full(item.sample.num_trained, advantage, np.float32))
            for item, advantage in zip(batch_of(rollouts, "rollout_mean", cut), flat, strict=True)
        ]

    def differs(moves, seed):
        rollouts = rollouts_of(moves, seed)
        built, apart = (with_sample_advantages(rollouts, cut, seed) for cut in (as_built, divided(seed)))
        return distance(gradient(apart, PPO), gradient(built, PPO)) > 0.01

    counterexample(differs)
