"""What k rollouts per task say: pass@k, and how sure it is. Pure.

pass@k is the chance that at least one of k rollouts solves a task, estimated without bias from n >= k of them: of all
ways to draw k of the n, the share that has a success (Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1).

Tasks are drawn, rollouts of one task are no independent evidence; so the interval of 95 % is over tasks. Where each
task says 0 or 1 (one rollout per task, pass@n, nothing or everything solved) their mean is a share, and the interval is
Wilson's; else it is the bootstrap's: percentiles of the means of tasks drawn again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manege.trainer.evaluate import wilson

__all__ = ["PassRate", "pass_at", "pass_rates"]

_NUM_RESAMPLES = 10_000
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """pass@k over tasks."""

    k: int
    rate: float
    low: float
    high: float
    method: str
    """Of the interval: `wilson` or `bootstrap`."""


def pass_at(k: int, *, num: int, num_success: int) -> float:
    """The estimate for one task of which `num` rollouts were made, at least k."""
    assert 1 <= k <= num
    return 1.0 - math.comb(num - num_success, k) / math.comb(num, k)


def pass_rates(successes: Sequence[int], num: int) -> Sequence[PassRate]:
    """For k = 1, 2, 4 ... and `num`. `successes`: of each task's `num` rollouts."""
    ks = sorted({min(2**power, num) for power in range(num.bit_length() + 1)})
    return [_rate(k, [pass_at(k, num=num, num_success=each) for each in successes]) for k in ks]


def _rate(k: int, chances: Sequence[float]) -> PassRate:
    rate = math.fsum(chances) / len(chances)
    if set(chances) <= {0.0, 1.0}:
        low, high = wilson(sum(chance == 1.0 for chance in chances), len(chances))
        return PassRate(k=k, rate=rate, low=low, high=high, method="wilson")
    # Tasks with the same chance are interchangeable: what counts is how often each chance is drawn.
    values, counts = np.unique(np.asarray(chances), return_counts=True)
    draws = np.random.default_rng(_SEED).multinomial(len(chances), counts / len(chances), size=_NUM_RESAMPLES)
    low, high = np.percentile(draws @ values / len(chances), (2.5, 97.5))
    return PassRate(k=k, rate=rate, low=float(low), high=float(high), method="bootstrap")
