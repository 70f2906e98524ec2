"""A group of rollouts to its credit: rewards after shaping, samples, and the advantage of every trained token.

In: a complete group with its calls. Out: its rollouts in the same order, each with its ledger. Advantages are formed
over all rollouts of the group that have a reward, before anything is packed or weighted; who has one that counts says
the outcome table (types.Outcome).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from manege.config import CreditConfig
from manege.trainer.algo.advantage import group_advantages, sample_advantages
from manege.trainer.algo.fates import SampleRules
from manege.trainer.algo.forest import Forest, build_forest
from manege.trainer.algo.ledger import Ledger, Reason
from manege.trainer.algo.returns import Earned, return_advantages
from manege.trainer.algo.samples import Sample, build_samples
from manege.trainer.algo.shaping import overlong_penalty
from manege.trainer.collect import Group
from manege.types import Call, CallId, FinishReason, FloatArray, Rollout

__all__ = [
    "CreditedRollout",
    "counted",
    "credit_group",
    "has_gradient",
    "is_flagged",
    "replaced_ledgers",
    "sample_rules",
    "shaped_rewards",
    "verdict",
    "why_lost",
]

_ZERO = 1e-9
"""Advantages below are rounding: rewards are of the order of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedRollout:
    """One rollout of a step."""

    rollout: Rollout
    forest: Forest
    samples: Sequence[Sample]
    ledger: Ledger
    """Without a reward nothing of it is trained."""
    reward: float | None
    """After shaping; None: neither in the baseline nor in the loss."""
    advantages: Sequence[FloatArray]
    """(M,) of each sample; zeros without a reward."""

    @property
    def is_informative(self) -> bool:
        """Whether it adds anything to the gradient."""
        return any(has_gradient(advantages_M) for advantages_M in self.advantages)


def has_gradient(advantages_M: FloatArray) -> bool:
    """Whether any of them is more than rounding."""
    return bool((np.abs(advantages_M) > _ZERO).any())


def verdict(rollout: Rollout) -> float | None:
    """The reward, if the outcome lets it count."""
    return rollout.reward if rollout.outcome is not None and rollout.outcome.counts else None


def is_flagged(rollout: Rollout) -> bool:
    """Whether its hack report says that it tried to cheat (`controller.hacks`)."""
    return any(rollout.evidence.get("hacks", {}).values())


def counted(rollout: Rollout, credit: CreditConfig) -> float | None:
    """The verdict as the run lets it count, before shaping. `zero` makes no bad reward better."""
    reward = verdict(rollout)
    if reward is None or credit.flagged == "keep" or not is_flagged(rollout):
        return reward
    return None if credit.flagged == "mask" else min(reward, 0.0)


def sample_rules(credit: CreditConfig, max_tokens: int | None) -> SampleRules:
    """What the run leaves out. `max_tokens`: the longest sample."""
    return SampleRules(
        side_calls=credit.side_calls == "train", cut_short=credit.cut_short != "mask", max_tokens=max_tokens
    )


def shaped_rewards(group: Group, credit: CreditConfig) -> Sequence[float | None]:
    """Verdicts that count, less what their length costs."""
    return [
        None if (reward := counted(rollout, credit)) is None else reward - _length_penalty(calls, credit)
        for rollout, calls in zip(group.rollouts, group.calls, strict=True)
    ]


def credit_group(
    group: Group, rewards_G: Sequence[float | None], credit: CreditConfig, rules: SampleRules
) -> Sequence[CreditedRollout]:
    """`rewards_G`: after shaping. Raises TrainerError when tokens do not add up."""
    forests = [build_forest(calls) for calls in group.calls]
    built = [build_samples(forest, rules) for forest in forests]
    samples_G = [samples for samples, _ in built]
    if credit.advantage == "returns":
        advantages = _by_call(group, rewards_G, credit, forests, samples_G)
    else:
        advantages = _by_sample(rewards_G, credit, samples_G)
    return [
        CreditedRollout(
            rollout=rollout,
            forest=forest,
            samples=samples,
            ledger=ledger.left_out(why_lost(rollout)) if reward is None else ledger,
            reward=reward,
            advantages=row,
        )
        for rollout, forest, (samples, ledger), reward, row in zip(
            group.rollouts, forests, built, rewards_G, advantages, strict=True
        )
    ]


def why_lost(rollout: Rollout) -> Reason:
    """Of a rollout without a reward that counts."""
    return Reason.NO_VERDICT if verdict(rollout) is None else Reason.FLAGGED


def replaced_ledgers(group: Group, rules: SampleRules) -> Sequence[Ledger]:
    """Of each rollout of a group that another one stands for."""
    return [build_samples(build_forest(calls), rules)[1].left_out(Reason.REPLACED) for calls in group.calls]


def _length_penalty(calls: Sequence[Call], credit: CreditConfig) -> float:
    """At most `length_penalty`: a rollout that was cut short and is too long made one mistake."""
    if credit.cut_short == "penalise" and any(call.finish_reason is FinishReason.LENGTH for call in calls):
        return credit.length_penalty
    if credit.overlong_tokens is None:
        return 0.0
    return overlong_penalty(
        sum(len(call.response_ids_R) for call in calls),
        limit=credit.overlong_tokens,
        buffer=credit.overlong_buffer,
        penalty=credit.length_penalty,
    )


def _by_sample(
    rewards_G: Sequence[float | None], credit: CreditConfig, samples_G: Sequence[Sequence[Sample]]
) -> Sequence[Sequence[FloatArray]]:
    """One number for all tokens of a sample: that of its rollout, or at sample level its own."""
    if credit.level == "sample":
        rows = sample_advantages(rewards_G, [len(samples) for samples in samples_G], credit.advantage)
    else:
        advantages_G = group_advantages(rewards_G, credit.advantage)
        rows = [
            None if advantage is None else [advantage] * len(samples)
            for advantage, samples in zip(advantages_G, samples_G, strict=True)
        ]
    return [
        [
            np.full(sample.num_trained, advantage, np.float32)
            for sample, advantage in zip(samples, row or [0.0] * len(samples), strict=True)
        ]
        for samples, row in zip(samples_G, rows, strict=True)
    ]


def _by_call(
    group: Group,
    rewards_G: Sequence[float | None],
    credit: CreditConfig,
    forests: Sequence[Forest],
    samples_G: Sequence[Sequence[Sample]],
) -> Sequence[Sequence[FloatArray]]:
    """One number for all tokens of a call."""
    given_G: Sequence[Mapping[CallId, float]] = group.call_rewards or [{}] * len(forests)
    earned_G = [
        {} if credit.flagged == "zero" and is_flagged(rollout) else given
        for rollout, given in zip(group.rollouts, given_G, strict=True)
    ]
    rows = return_advantages(
        [
            Earned(
                reward=reward,
                parents=forest.parents,
                call_rewards_C=[earned.get(call.id, 0.0) for call in forest.calls],
            )
            for reward, forest, earned in zip(rewards_G, forests, earned_G, strict=True)
        ],
        credit.discount,
    )
    found: list[Sequence[FloatArray]] = []
    for forest, samples, row in zip(forests, samples_G, rows, strict=True):
        of_call = {} if row is None else {call.id: value for call, value in zip(forest.calls, row, strict=True)}
        found.append([_spread(sample, of_call) for sample in samples])
    return found


def _spread(sample: Sample, of_call: Mapping[CallId, float]) -> FloatArray:
    """(M,)"""
    values = [np.full(span.stop - span.start, of_call.get(span.call_id, 0.0), np.float32) for span in sample.spans]
    return np.concatenate(values)
