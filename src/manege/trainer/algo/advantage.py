"""Advantages of the rollouts of one group, from their rewards.

A reward of None is "no verdict": such a rollout is neither in the baseline nor in the loss, and its advantage is None.
At rollout level a rollout counts once, however many calls or samples it has. A group whose rewards are all equal, or
that has a single one, has advantage zero throughout: exactly, not up to rounding.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["centred", "group_advantages", "grpo", "is_constant", "rloo", "sample_advantages"]

Values = npt.NDArray[np.float64]

_EPSILON = 1e-2
"""Keeps GRPO's division bounded when all rewards are nearly equal: rewards are of the order of 1."""
_EQUAL = 1e-9
"""Rewards this close to each other, relative to their size, differ by rounding only."""


def centred(rewards_G: Values) -> Values:
    """r_i - mean(r): GRPO without the division by the standard deviation (arXiv 2503.20783).

    1 0 0 0 -> mean 1/4 -> 3/4 -1/4 -1/4 -1/4
    """
    return rewards_G - rewards_G.mean()


def grpo(rewards_G: Values) -> Values:
    """(r_i - mean(r)) / (std(r) + 0.01), with the deviation of the population (arXiv 2402.03300, eq. 3, which has no
    term that bounds the division).

    1 0 -> mean 1/2, std 1/2 -> 0.5/0.51 -0.5/0.51
    """
    return centred(rewards_G) / (rewards_G.std() + _EPSILON)


def rloo(rewards_G: Values) -> Values:
    """r_i - mean of the others (arXiv 2402.14740), which is n / (n - 1) times the centred one.

    1 0 0 0 -> 1 - 0, 0 - 1/3, 0 - 1/3, 0 - 1/3
    """
    return centred(rewards_G) * len(rewards_G) / max(1, len(rewards_G) - 1)


_RULES: Mapping[str, Callable[[Values], Values]] = {"centred": centred, "grpo": grpo, "rloo": rloo}


def is_constant(values: Values) -> bool:
    """Whether nothing distinguishes them; also with none or one of them."""
    return not len(values) or bool(np.ptp(values) <= _EQUAL * max(1.0, float(np.abs(values).max())))


def group_advantages(rewards_G: Sequence[float | None], rule: str) -> Sequence[float | None]:
    """One advantage per rollout; None where there is no reward. `rule`: centred, grpo or rloo.

    1 3 2 None, centred -> mean of three 2 -> -1 1 0 None
    """
    return [None if row is None else row[0] for row in sample_advantages(rewards_G, [1] * len(rewards_G), rule)]


def sample_advantages(
    rewards_G: Sequence[float | None], num_samples_G: Sequence[int], rule: str
) -> Sequence[Sequence[float] | None]:
    """One advantage per sample of each rollout, for study only: every sample is a member of the group, so a rollout
    that fell into three counts three times in mean and deviation, and one without samples not at all.

    rewards 1 0, samples 3 1, centred -> members 1 1 1 0, mean 3/4 -> (1/4 1/4 1/4) (-3/4)
    """
    counts = [0 if reward is None else count for reward, count in zip(rewards_G, num_samples_G, strict=True)]
    members = np.repeat([0.0 if reward is None else reward for reward in rewards_G], counts)
    values = np.zeros(len(members)) if is_constant(members) else _RULES[rule](members)
    parts = np.split(values, np.cumsum(counts)[:-1])
    return [None if reward is None else part.tolist() for reward, part in zip(rewards_G, parts, strict=True)]
