"""Groups of rollouts to one weighted batch: forest, samples, advantages, weights, and the sums over them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from manege.config import CreditConfig
from manege.errors import TrainerError
from manege.trainer.algo.advantage import group_advantages
from manege.trainer.algo.fates import SampleRules
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.ledger import Fate, Ledger
from manege.trainer.algo.samples import Sample, build_samples
from manege.trainer.algo.weights import sample_weights
from manege.trainer.collect import Group
from manege.trainer.engines.base import WeightedSample
from manege.types import Rollout

__all__ = ["Batch", "build_batch", "diagnose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step trains on."""

    samples: Sequence[WeightedSample]
    """Those with an advantage other than zero: the others add nothing to the gradient, but count in the weights."""
    metrics: Mapping[str, float]


def build_batch(groups: Sequence[Group], credit: CreditConfig, *, success_reward: float, rng: random.Random) -> Batch:
    """Advantages first, over every rollout that has a reward; then weights over the whole step."""
    rewards = _rewards(groups, credit, rng)
    built: list[tuple[float, Sequence[Sample]]] = []
    ledgers: list[Ledger] = []
    informative = 0
    rules = SampleRules(side_calls=credit.side_calls == "train")
    for group, group_rewards in zip(groups, rewards, strict=True):
        advantages = group_advantages(group_rewards, credit.advantage)
        informative += any(abs(advantage or 0.0) > 1e-9 for advantage in advantages)
        for calls, advantage in zip(group.calls, advantages, strict=True):
            samples, ledger = build_samples(build_forest(calls), rules)
            ledgers.append(ledger)
            if advantage is not None:
                built.append((advantage, samples))
    weights = sample_weights(
        [samples for _, samples in built], credit.weighting, constant_tokens=credit.constant_tokens
    )
    weighted = [
        WeightedSample(sample=sample, advantages_M=np.full(sample.num_trained, advantage, np.float32), weight=weight)
        for (advantage, samples), row in zip(built, weights, strict=True)
        for sample, weight in zip(samples, row, strict=True)
        if abs(advantage) > 1e-9
    ]
    flat = [reward for group_rewards in rewards for reward in group_rewards if reward is not None]
    with_samples = [samples for _, samples in built if samples]
    return Batch(
        samples=weighted,
        metrics={
            "reward_mean": float(np.mean(flat)) if flat else 0.0,
            "success_rate": float(np.mean([reward >= success_reward for reward in flat])) if flat else 0.0,
            "num_rollouts": sum(len(group.rollouts) for group in groups),
            "num_verdicts": len(flat),
            "num_calls": sum(len(calls) for group in groups for calls in group.calls),
            "num_samples": sum(len(samples) for samples in with_samples),
            "samples_per_rollout": float(np.mean([len(samples) for samples in with_samples])) if with_samples else 0.0,
            "sampled_tokens": sum(ledger.sampled for ledger in ledgers),
            "dead_tokens": sum(ledger.of(Fate.DEAD) for ledger in ledgers),
            "excluded_tokens": sum(ledger.of(Fate.EXCLUDED) for ledger in ledgers),
            "informative_groups": informative,
        },
    )


def diagnose(groups: Sequence[Group], max_failed_fraction: float) -> None:
    """Stop instead of training on nothing. Raises TrainerError that says what most rollouts of the step lack."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    silent = [r for group in groups for r, calls in zip(group.rollouts, group.calls, strict=True) if not calls]
    unjudged = [rollout for rollout in rollouts if _verdict(rollout) is None]
    for failed, lack, hint in (
        (
            silent,
            "made no model call",
            "does the agent take its base URL and key from the environment (OPENAI_BASE_URL, OPENAI_API_KEY)?",
        ),
        (unjudged, "have no reward", "does the scorer return a number, and do attempts end without infra_error?"),
    ):
        if len(failed) > max_failed_fraction * len(rollouts):
            example = failed[0]
            tail = str(example.evidence.get("stderr_tail") or example.evidence.get("stdout_tail") or "").strip()
            raise TrainerError(
                f"{len(failed)} of {len(rollouts)} rollouts of this step {lack}: {hint} For example rollout "
                f"{example.spec.id}: outcome {example.outcome}, {example.message or 'no message'}"
                + (f"; it printed: {tail[-300:]!r}" if tail else "")
            )


def _verdict(rollout: Rollout) -> float | None:
    counts = rollout.outcome is not None and rollout.outcome.counts
    return rollout.reward if counts else None


def _rewards(groups: Sequence[Group], credit: CreditConfig, rng: random.Random) -> Sequence[Sequence[float | None]]:
    rewards = [[_verdict(rollout) for rollout in group.rollouts] for group in groups]
    if credit.shuffle_rewards:
        flat = [reward for row in rewards for reward in row]
        rng.shuffle(flat)
        values = iter(flat)
        rewards = [[next(values) for _ in row] for row in rewards]
    return rewards
