"""What a batch says about itself; the names are in metrics.py."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manege.config import CreditConfig
from manege.trainer.algo.branches import Decode, branches
from manege.trainer.algo.ledger import Fate, Ledger
from manege.trainer.collect import Group
from manege.trainer.credit import CreditedRollout, counted, is_flagged, verdict

__all__ = ["batch_metrics", "reward_metrics"]

_BINS = ((1, "1"), (2, "2"), (4, "3-4"), (8, "5-8"))
"""Samples of a rollout: up to how many, and the name."""


def reward_metrics(groups: Sequence[Group], success_reward: float) -> Mapping[str, float]:
    """Verdicts as they were given, before shaping."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    flagged = [rollout for rollout in rollouts if is_flagged(rollout)]
    given, of_flagged = (
        [reward for each in row if (reward := verdict(each)) is not None] for row in (rollouts, flagged)
    )
    return {
        "reward_mean": _mean(given),
        "success_rate": _mean([float(reward >= success_reward) for reward in given]),
        "flagged": len(flagged),
        "flagged_rewarded": _mean([float(reward >= success_reward) for reward in of_flagged]),
    }


def batch_metrics(
    groups: Sequence[Sequence[CreditedRollout]], ledger: Ledger, decode: Decode | None, credit: CreditConfig
) -> Mapping[str, Any]:
    """Of the groups that are trained on; `ledger` is of all that was sampled for the step."""
    rollouts = [rollout for group in groups for rollout in group]
    judged = [rollout for rollout in rollouts if rollout.reward is not None]
    num_samples = [len(rollout.samples) for rollout in judged if rollout.samples]
    num_verdicts = [sum(rollout.reward is not None for rollout in group) for group in groups]
    informative = sum(any(rollout.is_informative for rollout in group) for group in groups)
    return {
        "num_rollouts": len(rollouts),
        "num_verdicts": len(judged),
        "num_calls": sum(len(rollout.forest.calls) for rollout in rollouts),
        "num_samples": sum(num_samples),
        "length_penalty_mean": _mean(
            [(counted(each.rollout, credit) or 0.0) - (each.reward or 0.0) for each in judged]
        ),
        "informative_groups": informative,
        "constant_groups": len(groups) - informative,
        "lone_groups": num_verdicts.count(1),
        **_fragmentation(num_samples),
        **_tokens(rollouts, ledger),
        "branches": _branches(rollouts, decode),
    }


def _fragmentation(num_samples: Sequence[int]) -> Mapping[str, Any]:
    histogram = {name: 0 for _, name in _BINS} | {">8": 0}
    for number in num_samples:
        histogram[next((name for most, name in _BINS if number <= most), ">8")] += 1
    return {
        "samples_per_rollout": _mean(num_samples),
        "samples_per_rollout_max": max(num_samples, default=0),
        "one_sample_fraction": _mean([float(number == 1) for number in num_samples]),
        "samples_histogram": histogram,
    }


def _tokens(rollouts: Sequence[CreditedRollout], ledger: Ledger) -> Mapping[str, Any]:
    of_calls = sum(
        len(call.prompt_ids_P) + len(call.response_ids_R) for rollout in rollouts for call in rollout.forest.calls
    )
    return {
        "sampled_tokens": ledger.sampled,
        "dead_tokens": ledger.of(Fate.DEAD),
        "truncated_tokens": ledger.of(Fate.TRUNCATED),
        "excluded_tokens": ledger.of(Fate.EXCLUDED),
        "context_tokens": ledger.context,
        "trained_fraction": ledger.trained / max(1, ledger.sampled),
        "tokens_by_reason": {reason.value: count for reason, count in ledger.tokens.items() if count},
        "calls_by_reason": {reason.value: count for reason, count in ledger.calls.items() if count},
        "call_unique_fraction": sum(rollout.forest.num_unique for rollout in rollouts) / max(1, of_calls),
    }


def _branches(rollouts: Sequence[CreditedRollout], decode: Decode | None) -> Mapping[str, int]:
    return Counter(branch.kind.value for rollout in rollouts for branch in branches(rollout.forest, decode))


def _mean(values: Sequence[float]) -> float:
    """0 of nothing."""
    return float(np.mean(values)) if values else 0.0
