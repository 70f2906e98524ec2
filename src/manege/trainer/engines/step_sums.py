"""Sums over the trained tokens of a step, micro-batch after micro-batch, and the report that they make.

Sampler against trainer: the recorded log-probabilities against those of the present weights. In sync training they
belong to the same weights, so that the gap is numerical noise; a larger one is a bug, or staleness.
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from manege.trainer.algo.samples import Sample
from manege.trainer.engines.base import StepReport, VersionGap
from manege.trainer.engines.micro_loss import MicroLoss
from manege.trainer.losses.kl import k3

__all__ = ["StepSums"]


class StepSums:
    """Of one optimiser step; add micro-batches, then report."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._gaps: dict[int, VersionGap] = {}

    @property
    def loss(self) -> float:
        """So far."""
        return self._sums["loss"]

    @torch.no_grad()
    def add(self, samples: Sequence[Sample], found: MicroLoss, *, entropy_M: Tensor, num_nodes: int) -> None:
        """One micro-batch."""
        tokens, logprobs_M, recorded_M = found.tokens, found.logprobs_M, found.recorded_M
        for name, value in {
            "loss": found.loss,
            "clipped": tokens.clipped_M.sum(),
            "masked": tokens.masked_M.sum(),
            "mismatch": tokens.weight_M.sum(),
            "entropy": entropy_M.sum(),
            **({} if tokens.kl_M is None else {"kl": tokens.kl_M.sum()}),
        }.items():
            self._sums[name] += float(value)
        self._sums["trained"] += len(logprobs_M)
        self._sums["unique"] += num_nodes
        self._sums["total"] += sum(sample.num_tokens for sample in samples)
        self._add_gaps(samples, (logprobs_M - recorded_M).abs(), k3(recorded_M, logprobs_M))

    def _add_gaps(self, samples: Sequence[Sample], gap_M: Tensor, kl_M: Tensor) -> None:
        versions_M = torch.cat([torch.from_numpy(sample.versions_M) for sample in samples]).to(gap_M.device)
        for version in versions_M.unique().tolist():
            own_M = versions_M == version
            gap, kl = gap_M[own_M], kl_M[own_M]
            found = VersionGap(tokens=len(gap), total=float(gap.sum()), largest=float(gap.max()), kl=float(kl.sum()))
            self._gaps[version] = self._gaps[version] + found if version in self._gaps else found

    def __add__(self, other: "StepSums") -> "StepSums":
        """Those of two data-parallel ranks."""
        both = StepSums()
        for part in (self, other):
            for name, value in part._sums.items():
                both._sums[name] += value
            for version, gap in part._gaps.items():
                both._gaps[version] = both._gaps[version] + gap if version in both._gaps else gap
        return both

    def report(self, *, grad_norm: float, learning_rate: float) -> StepReport:
        """Means over the trained tokens, under the names of docs/reference/metrics.md."""
        sums = self._sums
        gap = functools.reduce(operator.add, self._gaps.values())
        metrics = {
            "loss": sums["loss"],
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "trained_tokens": sums["trained"],
            "unique_tokens": sums["unique"],
            "total_tokens": sums["total"],
            "unique_ratio": sums["unique"] / sums["total"],
            "clip_fraction": sums["clipped"] / sums["trained"],
            "masked_fraction": sums["masked"] / sums["trained"],
            "mismatch_weight_mean": sums["mismatch"] / sums["trained"],
            "entropy": sums["entropy"] / sums["trained"],
            "gap_mean": gap.total / gap.tokens,
            "gap_max": gap.largest,
            "gap_kl": gap.kl / gap.tokens,
        }
        if "kl" in sums:
            metrics["kl_reference"] = sums["kl"] / sums["trained"]
        return StepReport(metrics=metrics, gap_by_version=self._gaps)
