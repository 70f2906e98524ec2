"""How fast an engine is, from the calls that it served.

A call of k tokens beside n - 1 others lasts k * (base + slope * n) and, in addition, prefill seconds for each prompt
token that anybody brought meanwhile: linear in the three, so that least squares finds them, none below zero.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulate_async.engine import Speed

__all__ = ["Served", "fit_speed"]

_ROUNDS = 10
"""The number of steps in a time depends on the speed that is sought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A call."""

    start_s: float
    end_s: float
    new_tokens: int
    """Of its prompt, that the engine had to read."""
    num_tokens: int
    """Of its answer."""


def fit_speed(calls: Sequence[Served], *, max_batch: int) -> Speed:
    """Of one engine that served all of them."""
    calls = [call for call in calls if call.end_s > call.start_s and call.num_tokens]
    starts_N, ends_N = np.array([call.start_s for call in calls]), np.array([call.end_s for call in calls])
    tokens_N, seconds_N = np.array([float(call.num_tokens) for call in calls]), ends_N - starts_N
    order_N = np.argsort(starts_N, kind="stable")
    new_N = np.array([float(call.new_tokens) for call in calls])[order_N]
    brought_until_N = np.concatenate([[0.0], np.cumsum(new_N)])
    until_start_N, until_end_N = (np.searchsorted(starts_N[order_N], times_N) for times_N in (starts_N, ends_N))
    brought_N = brought_until_N[until_end_N] - brought_until_N[until_start_N]
    speed = Speed(base_s=1.0, max_batch=max_batch)
    for _ in range(_ROUNDS):
        beside_N = _mean_number(starts_N, ends_N, speed)
        columns = np.stack([tokens_N, tokens_N * beside_N, brought_N], axis=1)
        base_s, slope_s, prefill_s = _not_negative(columns, seconds_N)
        speed = Speed(base_s=max(base_s, 1e-6), slope_s=slope_s, prefill_s=prefill_s, max_batch=max_batch)
    return speed


def _mean_number(starts_N: np.ndarray, ends_N: np.ndarray, speed: Speed) -> np.ndarray:
    """Of sequences in the batch per decode step, for each call: there are fewer steps in a second of many sequences."""
    times_E = np.concatenate([starts_N, ends_N])
    order_E = np.argsort(times_E, kind="stable")
    changes_E = np.concatenate([np.ones(len(starts_N)), -np.ones(len(ends_N))])[order_E]
    times_E, number_E = times_E[order_E], np.minimum(np.cumsum(changes_E), speed.max_batch)[:-1]
    steps_E = np.diff(times_E) / (speed.base_s + speed.slope_s * number_E)
    steps_until_E, sequences_until_E = (
        np.concatenate([[0.0], np.cumsum(each)]) for each in (steps_E, steps_E * number_E)
    )

    def between(until_E: np.ndarray) -> np.ndarray:
        return np.interp(ends_N, times_E, until_E) - np.interp(starts_N, times_E, until_E)

    return between(sequences_until_E) / between(steps_until_E)


def _not_negative(columns: np.ndarray, values: np.ndarray) -> Sequence[float]:
    """The best of all subsets of columns whose solution has no negative part."""
    best, best_error = np.zeros(columns.shape[1]), np.inf
    for size in range(1, columns.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(columns.shape[1]), size)):
            found = np.linalg.lstsq(columns[:, chosen], values, rcond=None)[0]
            error = float(np.square(columns[:, chosen] @ found - values).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(columns.shape[1]), error
                best[chosen] = found
    return [float(value) for value in best]
