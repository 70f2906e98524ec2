"""Advantages per call: what was earned from a call on, less what the group earns on average.

In: of each rollout of a group, the parents of its calls (forest.py), the rewards of its calls and its own. Out: one
advantage per call. A reward counts for its call and for those that it continues, not for other branches: what one
sub-agent earns is no merit of its sister. Reward-to-go with a baseline: Sutton and Barto, Reinforcement Learning, 2nd
ed., 13.3 and 13.4 (http://incompleteideas.net/book/the-book.html); our baseline is the group's, not a learnt one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manege.trainer.algo.advantage import is_constant

__all__ = ["Earned", "call_returns", "return_advantages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """What one rollout got. C calls."""

    reward: float | None
    """Of the whole; None: no verdict, and then it is neither in the baseline nor in the loss."""
    parents: Sequence[int | None]
    """(C,) of its forest: a parent stands before its children."""
    call_rewards_C: Sequence[float]
    """0 where nobody gave one."""


def call_returns(earned: Earned, discount: float) -> Sequence[float]:
    """G of each call: its own reward and those of its descendants, times discount^(calls down to them), and the
    rollout's, times discount^(calls down to its deepest descendant).

    A <- B (B continues A), B earned 2, the rollout 1, discount 1/2:
        G_B = 2 + 1 = 3        G_A = 1/2 2 + 1/2 1 = 3/2
    """
    assert earned.reward is not None
    returns, depths = list(earned.call_rewards_C), [0] * len(earned.parents)
    for child in reversed(range(len(earned.parents))):
        if (parent := earned.parents[child]) is not None:
            returns[parent] += discount * returns[child]
            depths[parent] = max(depths[parent], depths[child] + 1)
    return [value + discount**depth * earned.reward for value, depth in zip(returns, depths, strict=True)]


def return_advantages(group: Sequence[Earned], discount: float) -> Sequence[Sequence[float] | None]:
    """Per rollout, one advantage per call; None without a reward. The baseline is the mean over rollouts of the mean
    over their calls, so that a rollout counts once; one without calls counts by its reward.

    The rollout above and one without calls and reward 1/4, discount 1/2:
        baseline ((3 + 3/2) / 2 + 1/4) / 2 = 5/4        A 1/4, B 7/4; nothing for the other
    Without rewards of calls and with discount 1 every call gets the `centred` advantage of its rollout.
    """
    returns = [None if earned.reward is None else call_returns(earned, discount) for earned in group]
    levels = [row or [earned.reward] for row, earned in zip(returns, group, strict=True) if row is not None]
    if is_constant(np.array([value for row in levels for value in row], np.float64)):
        return [None if row is None else [0.0] * len(row) for row in returns]
    baseline = np.mean([np.mean(np.array(row, np.float64)) for row in levels])
    return [None if row is None else [float(value - baseline) for value in row] for row in returns]
