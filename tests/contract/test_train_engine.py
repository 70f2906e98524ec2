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
from manege.trainer.update import run_update
from tests.calls import ROLLOUTS, merged, weighted

FOLDER = open_folder(str(Path(__file__).parents[1] / "tiny" / "model"))
OBJECTIVE = objective_of(CreditConfig(clip_high=0.28))


def torch_engine(*, reference=False, **settings):
    config = TrainConfig(learning_rate=1e-3, warmup_steps=0, **settings)
    return TorchEngine(load_model(FOLDER), FOLDER, config, reference=reference)


def engine_of_adapters(**settings):
    return torch_engine(lora_rank=4, **settings)


ENGINES = {"torch": torch_engine, "torch with adapters": engine_of_adapters}


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


def shifted(item, shift, *, version):
    """As if a version that gave each token `exp(shift)` times today's probability had sampled."""
    sample = item.sample
    changes = {
        "logprobs_M": sample.logprobs_M + np.float32(shift),
        "versions_M": np.full_like(sample.versions_M, version),
    }
    return dataclasses.replace(item, sample=dataclasses.replace(sample, **changes))


def test_the_gap_between_sampler_and_trainer_is_told_by_version(make_engine, batch):
    engine = make_engine()
    first, second, *rest = on_policy(engine, batch)
    report = engine.step(
        [shifted(first, 0.5, version=3), shifted(second, -0.25, version=5)] + [shifted(i, 0, version=5) for i in rest],
        OBJECTIVE,
    )
    sizes = [item.sample.num_trained for item in batch]
    total = 0.5 * sizes[0] + 0.25 * sizes[1]
    assert report.metrics["gap_max"] == pytest.approx(0.5, abs=1e-4)
    assert report.metrics["gap_mean"] == pytest.approx(total / sum(sizes), abs=1e-4)
    kls = sizes[0] * (np.exp(-0.5) - 1 + 0.5), sizes[1] * (np.exp(0.25) - 1 - 0.25)
    assert report.metrics["gap_kl"] == pytest.approx(sum(kls) / sum(sizes), abs=1e-4)
    own = sum(sizes[1:])
    assert report.gap_by_distance(5) == {
        "0": pytest.approx({"mean": 0.25 * sizes[1] / own, "max": 0.25, "kl": kls[1] / own}, abs=1e-4),
        "2": pytest.approx({"mean": 0.5, "max": 0.5, "kl": kls[0] / sizes[0]}, abs=1e-4),
    }


def test_the_gap_of_tokens_that_nobody_knows_the_version_of_is_told_apart(make_engine, batch):
    engine = make_engine()
    report = engine.step([shifted(item, 0.5, version=-1) for item in on_policy(engine, batch)], OBJECTIVE)
    gap = {"mean": 0.5, "max": 0.5, "kl": np.exp(-0.5) - 0.5}
    assert report.gap_by_distance(5) == {"unknown": pytest.approx(gap, abs=1e-4)}


def test_decoupled_steps_weigh_and_mask_by_the_distance_from_the_sampler(make_engine, batch):
    engine = make_engine()
    first, second, *rest = on_policy(engine, batch)
    decoupled = dataclasses.replace(OBJECTIVE, ratio="decoupled", mismatch_cap=2.0, mismatch_band=5.0)
    metrics = engine.step(
        [shifted(first, -np.log(3), version=1), shifted(second, -np.log(6), version=1), *rest], decoupled
    ).metrics
    sizes = [item.sample.num_trained for item in batch]
    assert metrics["masked_fraction"] == pytest.approx(sizes[1] / sum(sizes))
    assert metrics["mismatch_weight_mean"] == pytest.approx((2 * sizes[0] + sum(sizes[2:])) / sum(sizes), abs=1e-4)
    assert metrics["clip_fraction"] == 0


def test_the_start_of_an_update_can_be_an_earlier_policy(make_engine, batch):
    engine = make_engine()
    batch = on_policy(engine, batch)
    # Now pi / prox = 2 everywhere: what is good is clipped, what is bad is not.
    moved = [dataclasses.replace(i, proximal_M=i.sample.logprobs_M - np.float32(np.log(2))) for i in batch]
    metrics = engine.step(moved, dataclasses.replace(OBJECTIVE, ratio="decoupled")).metrics
    good = sum(item.sample.num_trained for item in batch if item.advantages_M[0] > 0)
    assert metrics["clip_fraction"] == pytest.approx(good / metrics["trained_tokens"])
    assert metrics["mismatch_weight_mean"] == pytest.approx(0.5, abs=1e-4)


def test_the_reference_is_the_model_that_the_engine_began_with(make_engine, batch, tmp_path):
    with_kl = dataclasses.replace(OBJECTIVE, kl=0.1)
    engine = make_engine(reference=True)
    at_first = engine.step(on_policy(engine, batch), with_kl).metrics["kl_reference"]
    engine.save(tmp_path / "checkpoint")
    resumed = make_engine(reference=True)
    resumed.load(tmp_path / "checkpoint")
    later = [e.step(on_policy(e, batch), with_kl).metrics["kl_reference"] for e in (engine, resumed)]
    assert at_first == pytest.approx(0, abs=1e-6)
    assert later[0] == later[1] > 1e-4


def test_with_a_kl_term_samples_without_advantage_have_a_gradient(make_engine, batch):
    engine = make_engine(reference=True)
    engine.step(on_policy(engine, batch), OBJECTIVE)
    idle = [
        dataclasses.replace(item, advantages_M=np.zeros_like(item.advantages_M)) for item in on_policy(engine, batch)
    ]
    assert engine.step(idle, dataclasses.replace(OBJECTIVE, kl=1.0)).metrics["grad_norm"] > 1e-3
    assert engine.step(idle, OBJECTIVE).metrics["grad_norm"] == 0


def test_a_kl_term_without_a_reference_is_refused(make_engine, batch):
    engine = make_engine()
    assert not engine.capabilities.reference
    with pytest.raises(TrainerError, match="kl"):
        engine.step(batch, dataclasses.replace(OBJECTIVE, kl=0.1))


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_every_loss_that_an_engine_claims_raises_what_was_better(make_engine, batch, loss):
    engine = make_engine()
    if loss not in engine.capabilities.losses:
        pytest.skip(f"this engine does not compute {loss}")
    batch = on_policy(engine, batch)
    engine.step(batch, dataclasses.replace(OBJECTIVE, loss=loss))
    after = engine.logprobs([item.sample for item in batch])
    for item, logprobs in zip(batch[:2], after, strict=False):
        assert np.sign((logprobs - item.sample.logprobs_M).sum()) == np.sign(item.advantages_M[0])


def test_a_broken_gradient_changes_nothing(make_engine, batch):
    engine = make_engine()
    before = engine.logprobs([batch[0].sample])[0]
    with pytest.raises(TrainerError, match="not finite"):
        engine.step([dataclasses.replace(item, weight=float("nan")) for item in batch], OBJECTIVE)
    assert np.array_equal(engine.logprobs([batch[0].sample])[0], before)


def test_steps_that_belong_together_are_undone_together(make_engine, batch):
    """The second mini-batch fails: weights and optimiser are as before the first."""
    engine, other = make_engine(), make_engine()
    before = engine.logprobs([batch[0].sample])[0]
    broken = [dataclasses.replace(item, weight=float("nan")) for item in batch]
    with pytest.raises(TrainerError, match="not finite"):
        run_update(engine, [batch, broken], OBJECTIVE)
    assert np.array_equal(engine.logprobs([batch[0].sample])[0], before)
    reports = [run_update(each, [batch, batch], OBJECTIVE).metrics for each in (engine, other)]
    assert reports[0] == reports[1]
    after = [each.logprobs([batch[0].sample])[0] for each in (engine, other)]
    assert np.array_equal(after[0], after[1])


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
