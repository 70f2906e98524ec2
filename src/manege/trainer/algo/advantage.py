"""Advantages of the rollouts of one group, from their rewards.

A reward of None is "no verdict": such a rollout is neither in the baseline nor in the loss, and its advantage is None.
Rewards are compared at rollout level: a rollout counts once, however many calls or samples it has.

Sources: GRPO, arXiv 2402.03300, eq. 3; RLOO, arXiv 2402.14740; without the division by the standard deviation
("centred"), arXiv 2503.20783.
"""

from collections.abc import Sequence

import numpy as np

__all__ = ["group_advantages"]

_EPSILON = 1e-2
"""Keeps GRPO's division bounded when all rewards are nearly equal: rewards are of the order of 1."""


def group_advantages(rewards_G: Sequence[float | None], rule: str) -> Sequence[float | None]:
    """One advantage per rollout; None where there is no reward. `rule`: centred, grpo or rloo.

    `grpo` uses the standard deviation of the population; `rloo` is r_i minus the mean of the others, and 0 for a group
    with a single verdict.
    """
    present = np.array([reward for reward in rewards_G if reward is not None], np.float64)
    if not len(present):
        return [None] * len(rewards_G)
    centred = present - present.mean()
    if rule == "grpo":
        centred = centred / (present.std() + _EPSILON)
    elif rule == "rloo":
        centred = centred * len(present) / max(1, len(present) - 1)
    elif rule != "centred":
        raise ValueError(f"unknown advantage rule {rule!r}; known: centred, grpo, rloo")
    values = iter(centred.tolist())
    return [None if reward is None else next(values) for reward in rewards_G]
