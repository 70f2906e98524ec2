"""The update depends on rollouts, not on how they fall apart: gradients of a real (tiny) model in float64."""

from pathlib import Path

import pytest
import torch

from manege.config import CreditConfig, TrainConfig
from manege.errors import TrainerError
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from tests.calls import ROLLOUTS, merged, split, weighted

FOLDER = open_folder(str(Path(__file__).parents[1] / "tiny" / "model"))
OBJECTIVE = objective_of(CreditConfig(clip_high=0.28))


def make_engine(*, dtype=torch.float64, **settings):
    return TorchEngine(load_model(FOLDER, dtype=dtype), FOLDER, TrainConfig(**settings))


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
