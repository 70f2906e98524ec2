"""Every combination of credit that a run may ask for trains a real (tiny) model, and what is not in the table starts no
run. The policy is the one that sampled, but for the second mini-batch, whose weights have moved."""

import dataclasses
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from manege.config import CreditConfig, TrainConfig
from manege.credit_config import COMBINATIONS, OBJECTIVES, Combination
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.batch import build_batch
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from manege.trainer.update import run_update
from tests.calls import linear_rollout, make_call
from tests.unit.test_batch import group

FOLDER = open_folder(str(Path(__file__).parents[1] / "tiny" / "model"))
MODEL = load_model(FOLDER, dtype=torch.float32)
WEIGHTS = {name: value.clone() for name, value in MODEL.module.state_dict().items()}
VALUES = {
    "level": ["rollout", "sample"],
    "advantage": ["centred", "grpo", "rloo", "returns"],
    "weighting": ["rollout_mean", "token_mean", "constant", "sample_mean"],
    "loss": ["ppo", "cispo", "gspo"],
    "ratio": ["recorded", "decoupled"],
    "mismatch_level": ["token", "call"],
}
NAMES = [each.name for each in dataclasses.fields(Combination)]


def config(combination, **changes):
    constant = {"constant_tokens": 8} if combination.weighting == "constant" else {}
    return CreditConfig(**dataclasses.asdict(combination), **constant, **changes)


def fresh_engine(*, reference=False, **changes):
    MODEL.module.load_state_dict(WEIGHTS)
    config = TrainConfig(**{"warmup_steps": 0, "learning_rate": 1e-4, **changes})
    return TorchEngine(MODEL, FOLDER, config, reference=reference)


def calls_of(name):
    """Two turns and a sub-agent: two samples, three calls."""
    calls = linear_rollout(name, [([10, 11], [20, 21]), ([12], [22, 23, 24])])
    return [*calls, make_call(f"{name}.sub", [7, 8], [9, 10], rollout=name)]


@pytest.fixture(scope="module")
def groups():
    """Of what the model itself says of these tokens, so that sampler and trainer agree."""
    rewards = {"a": [1.0, 0.0, None], "b": [0.5, 2.0, 0.25], "c": [1.0, 1.0, 1.0]}
    engine = fresh_engine()
    found = []
    for name, row in rewards.items():
        calls = [calls_of(f"{name}{i}") for i in range(len(row))]
        calls[0] = calls[0][:2]
        earned = [{each[-1].id: 0.5} for each in calls] if name == "b" else [{}] * len(row)
        whole = build_batch([group(name, row, calls=calls)], CreditConfig(kl=1), success_reward=1, rng=random.Random(0))
        samples = [sample for rollout in whole.rollouts for sample in rollout.samples]
        known = {}
        for sample, logprobs_M in zip(samples, engine.logprobs(samples), strict=True):
            sizes = [span.stop - span.start for span in sample.spans]
            parts = np.split(logprobs_M, np.cumsum(sizes)[:-1])
            known |= {span.call_id: part for span, part in zip(sample.spans, parts, strict=True)}
        recorded = [[dataclasses.replace(call, logprobs_R=known[call.id]) for call in each] for each in calls]
        found.append(group(name, row, calls=recorded, call_rewards=earned))
    return found


def build(groups, credit, num_mini_batches=1):
    return build_batch(groups, credit, success_reward=1.0, rng=random.Random(0), num_mini_batches=num_mini_batches)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda row: "-".join(dataclasses.astuple(row)))
def test_every_combination_trains(groups, combination):
    credit = config(combination)
    batch = build(groups, credit)
    assert {item.sample.rollout_id[0] for item in batch.samples} == {"a", "b"}
    engine = fresh_engine()
    report = run_update(engine, batch.mini_batches, objective_of(credit))
    after = engine.logprobs([item.sample for item in batch.samples])
    gain = sum(
        item.weight * float(item.advantages_M @ (new_M - item.sample.logprobs_M))
        for item, new_M in zip(batch.samples, after, strict=True)
    )
    assert all(np.isfinite(list(report.metrics.values())))
    assert (report.metrics["grad_norm"] > 1e-6, gain > 0) == (True, True)
    assert report.metrics["gap_max"] < 1e-4

    report = run_update(engine, build(groups, credit, 2).mini_batches, objective_of(credit))
    assert all(np.isfinite(list(report.metrics.values())))
    assert report.metrics["trained_tokens"] == sum(item.sample.num_trained for item in batch.samples)
    assert build(groups[2:], credit).samples == []


@pytest.mark.parametrize("objective", OBJECTIVES, ids="-".join)
def test_a_divergence_term_has_a_gradient_where_rewards_have_none(groups, objective):
    credit = config(Combination("rollout", "centred", "rollout_mean", *objective), kl=0.5)
    engine = fresh_engine(reference=True)
    with torch.no_grad():
        for parameter in MODEL.module.parameters():
            parameter *= 1.01
    report = run_update(engine, build(groups[2:], credit).mini_batches, objective_of(credit))
    assert report.metrics["grad_norm"] > 1e-6
    assert report.metrics["kl_reference"] > 0


def test_later_steps_of_a_decoupled_update_know_the_policy_at_its_start(groups):
    """The sampler is the policy at the start, so nothing is to be corrected; the second step's own weights are not."""
    credit = CreditConfig(ratio="decoupled")
    mini_batches = build(groups, credit, 2).mini_batches
    report = run_update(fresh_engine(learning_rate=1e-2), mini_batches, objective_of(credit))
    assert report.metrics["mismatch_weight_mean"] == pytest.approx(1.0, abs=1e-5)
    engine = fresh_engine(learning_rate=1e-2)
    engine.step(mini_batches[0], objective_of(credit))
    late = engine.step(mini_batches[1], objective_of(credit))
    assert abs(late.metrics["mismatch_weight_mean"] - 1) > 1e-3


def test_the_gap_of_an_update_is_that_before_its_first_step(groups):
    credit = CreditConfig()
    report = run_update(fresh_engine(learning_rate=1e-2), build(groups, credit, 2).mini_batches, objective_of(credit))
    assert report.metrics["gap_max"] < 1e-4
    assert report.gap_by_version.keys() == {1}


def test_mini_batches_without_a_gradient_are_passed_over(groups):
    mini_batches = build(groups, CreditConfig(), 8).mini_batches
    assert [len(part) > 0 for part in mini_batches] == [True] * 5 + [False] * 3
    report = run_update(fresh_engine(), mini_batches, objective_of(CreditConfig()))
    assert np.isfinite(report.metrics["loss"])


def test_all_other_combinations_are_refused():
    allowed = {dataclasses.astuple(row) for row in COMBINATIONS}
    assert len(allowed) == len(COMBINATIONS)
    refused = [Combination(*values) for values in itertools.product(*VALUES.values()) if values not in allowed]
    assert len(refused) + len(allowed) == 2 * 4 * 4 * 3 * 2 * 2
    for combination in refused:
        with pytest.raises(ValueError, match=r"is not a tested combination|does nothing here"):
            config(combination)


def test_the_table_has_every_value_of_every_key():
    for index, name in enumerate(NAMES):
        assert {dataclasses.astuple(row)[index] for row in COMBINATIONS} == set(VALUES[name])
