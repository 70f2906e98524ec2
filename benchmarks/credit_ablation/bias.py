"""How far the mean gradient of a setting lies from the truth, without what noise adds to that distance.

Both are known only as means over some chunks of rollouts, the same rollouts for both. Products of different chunks have
the right expectation, so lengths and cosines are taken from pairs of different chunks only, never from a chunk with
itself: a plain length would grow with the noise, and every cosine would shrink. What chance did to both at once cancels
in their ratio. Intervals come from resampling the chunks.

Shape legend: M chunks, P parameters.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.credit_ablation.meter import Gradient

__all__ = ["Distance", "Interval", "measure"]

_RESAMPLES = 2000
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Between the mean gradient g of a setting and the truth t."""

    cosine: Interval
    bias: Interval
    """|g - c t| / |c t| with the best scalar c: the tangent of the angle between them."""
    length: Interval
    """|g| / |t|."""
    noise: Interval
    """Of one step: the root of (the variance of its gradient / |g|^2)."""


def measure(gradients_MP: Gradient, truths_MP: Gradient, *, steps_per_chunk: int) -> Distance:
    """The distance and its intervals. A cosine that chance puts above 1 is 1."""
    g_MP, t_MP = gradients_MP.astype(np.float64), truths_MP.astype(np.float64)
    own_MM, cross_MM, truth_MM = g_MP @ g_MP.T, g_MP @ t_MP.T, t_MP @ t_MP.T

    def estimate(counts_M: FloatArray) -> tuple[float, float, float, float]:
        g_squared, cross, t_squared = (_product(matrix, counts_M) for matrix in (own_MM, cross_MM, truth_MM))
        if min(g_squared, t_squared) <= 0:  # nothing but noise
            return 0.0, np.inf, np.nan, np.inf
        cosine = min(1.0, cross / np.sqrt(g_squared * t_squared))
        bias = np.sqrt(1 - cosine**2) / cosine if cosine > 0 else np.inf
        variance = float(counts_M @ np.diag(own_MM) / counts_M.sum()) - g_squared
        return cosine, bias, np.sqrt(g_squared / t_squared), np.sqrt(max(0.0, variance * steps_per_chunk) / g_squared)

    size, rng = len(g_MP), np.random.default_rng(0)
    best = estimate(np.ones(size))
    counts = rng.multinomial(size, np.full(size, 1 / size), _RESAMPLES).astype(np.float64)
    lows, highs = np.nanquantile([estimate(counts_M) for counts_M in counts], [0.025, 0.975], axis=0)
    cosine, bias, length, noise = (
        Interval(value=float(value), low=float(low), high=float(high))
        for value, low, high in zip(best, lows, highs, strict=True)
    )
    return Distance(cosine=cosine, bias=bias, length=length, noise=noise)


def _product(products_MM: FloatArray, counts_M: FloatArray) -> float:
    """Of the two means, from pairs of different chunks."""
    weights_MM = np.outer(counts_M, counts_M)
    np.fill_diagonal(weights_MM, 0.0)
    return float((weights_MM * products_MM).sum() / weights_MM.sum())
