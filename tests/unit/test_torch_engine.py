"""What the torch engine does beyond the contract: the prefix tree, frozen parameters, entropy, float64."""

import dataclasses
from pathlib import Path

import pytest
import torch

from manege.config import CreditConfig, TrainConfig
from manege.errors import TrainerError
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from tests.calls import merged, split, weighted

FOLDER = open_folder(str(Path(__file__).parents[1] / "tiny" / "model"))
OBJECTIVE = objective_of(CreditConfig(clip_high=0.28))


def make_engine(model=None, *, dtype=torch.float64, **settings):
    return TorchEngine(model or load_model(FOLDER, dtype=dtype), FOLDER, TrainConfig(**settings))


def test_prefix_tree_computes_shared_tokens_once():
    batch = weighted("rollout_mean", split)
    with_tree = make_engine().step(batch, OBJECTIVE).metrics
    without = make_engine(prefix_tree=False).step(batch, OBJECTIVE).metrics
    assert with_tree["unique_tokens"] < 0.6 * without["unique_tokens"]
    assert with_tree["loss"] == pytest.approx(without["loss"], rel=1e-9)
    assert with_tree["grad_norm"] == pytest.approx(without["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_entropy_is_that_of_the_whole_vocabulary_where_trained_tokens_were_sampled(temperature):
    batch = [
        dataclasses.replace(item, sample=dataclasses.replace(item.sample, temperature=temperature))
        for item in weighted("rollout_mean", split)
    ]
    model = load_model(FOLDER, dtype=torch.float64)
    entropies = []
    for item in batch:
        ids_T = torch.from_numpy(item.sample.ids_T).long()
        with torch.no_grad():
            logits_TV = model.logits(model.hidden(ids_T, torch.arange(len(ids_T)), causal_attend([len(ids_T)])))
        distribution = torch.distributions.Categorical(logits=logits_TV / temperature)
        entropies += distribution.entropy()[item.sample.positions_M - 1].tolist()
    metrics = make_engine(model, micro_batch_tokens=20).step(batch, OBJECTIVE).metrics
    assert metrics["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)


def test_frozen_parameters_stay_as_they_were():
    model = load_model(FOLDER)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    make_engine(model, frozen=["embed_tokens"], learning_rate=1e-2).step(weighted("rollout_mean", merged), OBJECTIVE)
    changed = {name for name, p in model.module.named_parameters() if not torch.equal(p, before[name])}
    assert not any("embed_tokens" in name for name in changed)
    assert any("q_proj" in name for name in changed)


def test_freezing_an_unknown_name_is_refused():
    with pytest.raises(TrainerError, match="embedding"):
        make_engine(frozen=["embedding"])
