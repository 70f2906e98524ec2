"""Groups of rollouts to what an update trains on: mini-batches of weighted samples, a ledger, and metrics.

Stages: rewards after shaping; credit of each group (credit.py), over all of its rollouts that have a reward;
mini-batches of whole rollouts; weights within each of them. Nothing is dropped to fit a size.

Worked example: 7 rollouts with a reward, 2 mini-batches -> the first 4 and the last 3, in the order of the groups; with
`rollout_mean` a token of the first counts 1 / (4 T_i), one of the second 1 / (3 T_i).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manege.config import CreditConfig
from manege.trainer.algo.branches import Decode
from manege.trainer.algo.ledger import Ledger, sum_ledgers
from manege.trainer.algo.weights import sample_weights
from manege.trainer.batch_metrics import batch_metrics, reward_metrics
from manege.trainer.collect import Group
from manege.trainer.credit import (
    CreditedRollout,
    credit_group,
    has_gradient,
    replaced_ledgers,
    sample_rules,
    shaped_rewards,
)
from manege.trainer.engines.base import WeightedSample

__all__ = ["Batch", "build_batch", "is_informative"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What an update trains on."""

    mini_batches: Sequence[Sequence[WeightedSample]]
    """One optimiser step each. Samples that add nothing to the gradient are left out, but count in the weights; so a
    mini-batch may be empty."""
    rollouts: Sequence[CreditedRollout]
    """All rollouts of the groups, in their order."""
    ledger: Ledger
    """Of all sampled tokens of the step."""
    metrics: Mapping[str, Any]

    @property
    def samples(self) -> Sequence[WeightedSample]:
        """Of all mini-batches."""
        return [item for mini_batch in self.mini_batches for item in mini_batch]


def build_batch(
    groups: Sequence[Group],
    credit: CreditConfig,
    *,
    success_reward: float,
    rng: random.Random,
    num_mini_batches: int = 1,
    max_sample_tokens: int | None = None,
    replaced: Sequence[Group] = (),
    decode: Decode | None = None,
) -> Batch:
    """`rng`: for `shuffle_rewards`; `replaced`: groups that others stand for: they count in reward, success and ledger;
    `decode`: for the kinds of branches. Raises TrainerError when tokens do not add up."""
    rewards = [shaped_rewards(group, credit) for group in groups]
    if credit.shuffle_rewards:
        rewards = _shuffled(rewards, rng)
    rules = sample_rules(credit, max_sample_tokens)
    credited = [credit_group(group, row, credit, rules) for group, row in zip(groups, rewards, strict=True)]
    rollouts = [rollout for row in credited for rollout in row]
    judged = [rollout for rollout in rollouts if rollout.reward is not None]
    left_out = [ledger for group in replaced for ledger in replaced_ledgers(group, rules)]
    ledger = sum_ledgers([*(rollout.ledger for rollout in rollouts), *left_out])
    return Batch(
        mini_batches=[
            _weighted([judged[index] for index in part], credit)
            for part in np.array_split(np.arange(len(judged)), num_mini_batches)
        ],
        rollouts=rollouts,
        ledger=ledger,
        metrics={
            **reward_metrics([*groups, *replaced], success_reward),
            **batch_metrics(credited, ledger, decode, credit),
        },
    )


def is_informative(group: Group, credit: CreditConfig, max_sample_tokens: int | None) -> bool:
    """Whether anything can be learnt from comparing the group's rollouts."""
    rewards = shaped_rewards(group, credit)
    credited = credit_group(group, rewards, credit, sample_rules(credit, max_sample_tokens))
    return any(rollout.is_informative for rollout in credited)


def _weighted(rollouts: Sequence[CreditedRollout], credit: CreditConfig) -> Sequence[WeightedSample]:
    """One mini-batch; N of the weights are its rollouts. The divergence from a reference needs every sample."""
    samples = [rollout.samples for rollout in rollouts]
    weights = sample_weights(samples, credit.weighting, constant_tokens=credit.constant_tokens)
    return [
        WeightedSample(sample=sample, advantages_M=advantages_M, weight=weight)
        for rollout, row in zip(rollouts, weights, strict=True)
        for sample, advantages_M, weight in zip(rollout.samples, rollout.advantages, row, strict=True)
        if credit.kl > 0 or has_gradient(advantages_M)
    ]


def _shuffled(rewards: Sequence[Sequence[float | None]], rng: random.Random) -> Sequence[Sequence[float | None]]:
    """Among those that have one: who is masked stays so."""
    flat = [reward for row in rewards for reward in row if reward is not None]
    rng.shuffle(flat)
    values = iter(flat)
    return [[None if reward is None else next(values) for reward in row] for row in rewards]
