"""What the trainer asks of whatever holds the optimiser; implementations: torch, and verl later.

The update is fully described by its inputs: samples with per-token advantages and weights, and an objective. A train
engine knows nothing of rollouts beyond these weights, so that every credit rule works on every engine.

Shape legend: M trained tokens of one sample.
"""

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from manege.engine.base import Weights
from manege.trainer.algo.samples import Sample
from manege.trainer.objective import Objective
from manege.types import FloatArray

__all__ = ["Capabilities", "StepReport", "TrainEngine", "VersionGap", "WeightedSample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do; an impossible choice is refused at start."""

    prefix_tree: bool
    """Can compute tokens that samples share once."""
    max_sample_tokens: int
    """The longest sample that fits."""
    losses: Set[str]
    """Values of credit.loss that it computes."""
    reference: bool
    """Holds the frozen model that a KL term needs."""
    publishes: Literal["shared", "folder", "transfer"]
    """Kind of its Weights; `shared` ones change under the inference engine's hands, which is paused for a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSample:
    """A sample with its share of the loss: loss = sum over trained t of weight * l_t(advantage)."""

    sample: Sample
    advantages_M: FloatArray
    """Of the trained tokens."""
    weight: float
    proximal_M: FloatArray | None = None
    """Log-probabilities of the trained tokens at the start of the update; None: those of the present weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionGap:
    """Sampler against trainer, over the trained tokens that one policy version sampled."""

    tokens: int
    total: float
    """Sum of the absolute differences of their log-probabilities."""
    largest: float
    """Of these differences."""
    kl: float
    """Sum of the estimates (k3) of the sampler's divergence from the trainer."""

    def __add__(self, other: "VersionGap") -> "VersionGap":
        return VersionGap(
            tokens=self.tokens + other.tokens,
            total=self.total + other.total,
            largest=max(self.largest, other.largest),
            kl=self.kl + other.kl,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What an optimiser step says about itself, as of the weights before it."""

    metrics: Mapping[str, float]
    """Under the names of docs/reference/metrics.md."""
    gap_by_version: Mapping[int, VersionGap]
    """By the version that sampled; -1 where nobody knows."""

    def gap_by_distance(self, version: int) -> Mapping[str, Mapping[str, float]]:
        """mean, max and kl by the number of versions between sampling and `version`, the one in service at the
        update."""
        return {
            "unknown" if sampled < 0 else str(version - sampled): {
                "mean": gap.total / gap.tokens,
                "max": gap.largest,
                "kl": gap.kl / gap.tokens,
            }
            for sampled, gap in sorted(self.gap_by_version.items(), reverse=True)
        }


class TrainEngine(Protocol):
    """Holds weights and optimiser. Not safe for concurrent calls; blocking, so call it from a thread."""

    capabilities: Capabilities

    def logprobs(self, samples: Sequence[Sample]) -> Sequence[FloatArray]:
        """(M,) each: log-probabilities of the trained tokens under the present weights, at the sample's temperature."""
        ...

    def step(self, batch: Sequence[WeightedSample], objective: Objective) -> StepReport:
        """One optimiser step. Raises TrainerError on a non-finite loss or gradient, with weights and optimiser
        unchanged."""
        ...

    def undone_on_error(self) -> AbstractContextManager[None]:
        """Weights and optimiser are as before if the block raises; for several steps that belong together."""
        ...

    def publish(self) -> Weights:
        """Where the present weights can be read by an inference engine."""
        ...

    def save(self, folder: Path) -> None:
        """A model folder as `export` writes it, with optimiser and rng beside the weights."""
        ...

    def load(self, folder: Path) -> None:
        """The reverse of `save`. Raises TrainerError when the folder is of another model."""
        ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder: config, safetensors, tokenizer, chat template."""
        ...
