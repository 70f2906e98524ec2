"""The study of benchmarks/credit_ablation in small: its agent fragments, and its settings differ where they should."""

import asyncio

import numpy as np
import pytest

from benchmarks.credit_ablation.bias import measure
from benchmarks.credit_ablation.meter import Meter
from benchmarks.credit_ablation.one_core import one_core
from benchmarks.credit_ablation.trial import MODEL, SETTINGS, Trial, to_batch
from manege.model.folder import open_folder
from manege.trainer.algo.advantage import group_advantages, sample_advantages
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.trainer.algo.weights import sample_weights
from manege.trainer.engines.base import WeightedSample


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_core():
        yield


@pytest.fixture(scope="module")
def played(alone):
    """Per kind: the groups of two steps, and a meter at the weights that played them."""

    async def play(kind):
        async with Trial(kind, seed=1) as trial:
            groups = [group for step in await trial.collect(2) for group in step]
            return groups, Meter(trial.model, open_folder(str(MODEL)))

    return {kind: asyncio.run(play(kind)) for kind in ("retry", "gather")}


@pytest.mark.parametrize("kind", ["retry", "gather"])
def test_a_rollout_is_one_sample_per_conversation_and_their_number_varies(played, kind):
    groups, _ = played[kind]
    counts = []
    for calls in (calls for group in groups for calls in group.calls):
        samples, _ = build_samples(build_forest(calls))
        assert len(samples) == sum(call.parent is None for call in calls)
        counts.append(len(samples))
    assert len(set(counts)) >= 3


def test_failures_fall_into_more_samples_than_successes_where_the_agent_retries(played):
    groups, _ = played["retry"]
    counts = {0.0: [], 1.0: []}
    for group in groups:
        for rollout, calls in zip(group.rollouts, group.calls, strict=True):
            counts[rollout.reward].append(sum(call.parent is None for call in calls))
    assert np.mean(counts[0.0]) > np.mean(counts[1.0]) + 1


@pytest.mark.parametrize("kind", ["retry", "gather"])
def test_every_setting_gives_a_gradient_of_its_own(played, kind):
    groups, meter = played[kind]
    gradients = [meter.read([to_batch(groups, credit).samples], credit) for credit in SETTINGS.values()]
    for i, a in enumerate(gradients):
        for b in gradients[:i]:
            assert np.linalg.norm(a - b) > 1e-3 * np.linalg.norm(b)


def _per_call(groups, credit):
    """The same rollouts, cut further: every call is a sample of its own, with the context that it had."""
    rollouts, advantages = [], []
    for group in groups:
        cut = [[sample for call in calls for sample in build_samples(build_forest([call]))[0]] for calls in group.calls]
        rewards = [rollout.reward for rollout in group.rollouts]
        advantages += (
            sample_advantages(rewards, [len(samples) for samples in cut], credit.advantage)
            if credit.level == "sample"
            else [[value] * len(s) for value, s in zip(group_advantages(rewards, credit.advantage), cut, strict=True)]
        )
        rollouts += cut
    weights = sample_weights(rollouts, credit.weighting)
    return [
        WeightedSample(sample=sample, advantages_M=np.full(sample.num_trained, value, np.float32), weight=weight)
        for row in zip(rollouts, advantages, weights, strict=True)
        for sample, value, weight in zip(*row, strict=True)
    ]


@pytest.mark.parametrize("kind", ["retry", "gather"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_only_settings_that_count_rollouts_or_tokens_survive_another_cut(played, kind, setting):
    groups, meter = played[kind]
    credit = SETTINGS[setting]
    whole = meter.read([to_batch(groups, credit).samples], credit)
    cut = meter.read([_per_call(groups, credit)], credit)
    change = np.linalg.norm(cut - whole) / np.linalg.norm(whole)
    if setting in ("rollout/rollout_mean", "rollout/token_mean"):
        assert change < 1e-4
    else:
        assert change > 1e-3


def test_the_meter_leaves_the_weights_as_they_are(played):
    groups, meter = played["gather"]
    credit = SETTINGS["rollout/rollout_mean"]
    samples = to_batch(groups, credit).samples
    first = meter.read([samples], credit)
    assert np.array_equal(meter.read([samples], credit), first)
    assert np.allclose(meter.read([samples, samples], credit), first, atol=1e-6 * np.abs(first).max())


def test_the_distance_of_noisy_gradients_is_that_of_their_means():
    rng = np.random.default_rng(0)
    mean, truth = np.zeros(400), np.zeros(400)
    mean[:2], truth[:2] = (3.0, 4.0), (3.0, 0.0)
    noisy = [(vector + rng.normal(0, 0.5, (60, 400))).astype(np.float32) for vector in (mean, truth)]
    distance = measure(*noisy, steps_per_chunk=1)
    assert distance.cosine.value == pytest.approx(0.6, abs=0.03)
    assert distance.bias.value == pytest.approx(4 / 3, rel=0.15)
    assert distance.length.value == pytest.approx(5 / 3, rel=0.05)
    assert distance.noise.value == pytest.approx(10 / 5, rel=0.05)
    assert distance.cosine.low < 0.6 < distance.cosine.high
