"""One update: an optimiser step per mini-batch, all within one pause of the gateway.

In: the mini-batches of a batch. Out: one report for all of its steps. The proximal policy of `decoupled` is the one at
the start of the update: for the later steps its log-probabilities are computed before the first.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from manege.trainer.engines.base import StepReport, TrainEngine, WeightedSample
from manege.trainer.objective import Objective

__all__ = ["run_update"]

_SUMS = ("trained_tokens", "unique_tokens", "total_tokens")
_LAST = ("learning_rate",)
# Later steps see weights that the earlier ones have moved: their distance to the sampler is no mismatch.
_FIRST = ("gap_mean", "gap_max", "gap_kl")


def run_update(
    engine: TrainEngine, mini_batches: Sequence[Sequence[WeightedSample]], objective: Objective
) -> StepReport:
    """Blocking. Mini-batches without a sample are passed over; at least one has some."""
    parts = [part for part in mini_batches if part]
    if objective.ratio == "decoupled" and len(parts) > 1:
        parts = _with_proximal(engine, parts)
    return _combined([engine.step(part, objective) for part in parts])


def _with_proximal(
    engine: TrainEngine, parts: Sequence[Sequence[WeightedSample]]
) -> Sequence[Sequence[WeightedSample]]:
    logprobs = iter(engine.logprobs([item.sample for part in parts for item in part]))
    return [[dataclasses.replace(item, proximal_M=next(logprobs)) for item in part] for part in parts]


def _combined(reports: Sequence[StepReport]) -> StepReport:
    """Tokens are added up, most others are means over the trained tokens."""
    rows = [report.metrics for report in reports]
    tokens = sum(row["trained_tokens"] for row in rows)

    def value(name: str) -> Any:
        if name in _SUMS:
            return sum(row[name] for row in rows)
        if name in _LAST:
            return rows[-1][name]
        if name in _FIRST:
            return rows[0][name]
        return sum(row[name] * row["trained_tokens"] for row in rows) / tokens

    metrics = {name: value(name) for name in rows[0]}
    metrics["unique_ratio"] = metrics["unique_tokens"] / metrics["total_tokens"]
    return StepReport(metrics=metrics, gap_by_version=reports[0].gap_by_version)
