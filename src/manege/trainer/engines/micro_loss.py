"""The loss of a micro-batch, from the log-probabilities that a train engine computed: the same for all.

Shape legend: M trained tokens of the micro-batch, sample after sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manege.trainer.engines.base import WeightedSample
from manege.trainer.losses.combine import TokenLoss, token_loss
from manege.trainer.objective import Objective
from manege.types import FloatArray

__all__ = ["MicroLoss", "micro_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroLoss:
    """Only `loss` and `logprobs_M` carry a gradient."""

    loss: Tensor
    """The sum over the tokens of weight * loss."""
    tokens: TokenLoss
    logprobs_M: Tensor
    recorded_M: Tensor


def micro_loss(
    batch: Sequence[WeightedSample], logprobs_M: Tensor, objective: Objective, *, reference_M: Tensor | None
) -> MicroLoss:
    """`reference_M`: of the frozen model, where the objective has a KL term."""
    samples = [item.sample for item in batch]

    def constant(parts: Sequence[FloatArray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(logprobs_M.device, logprobs_M.dtype)

    present_M = logprobs_M.detach().split([sample.num_trained for sample in samples])
    proximal_M = torch.cat(
        [
            present if item.proximal_M is None else constant([item.proximal_M])
            for item, present in zip(batch, present_M, strict=True)
        ]
    )
    calls = [span.stop - span.start for sample in samples for span in sample.spans]
    recorded_M = constant([sample.logprobs_M for sample in samples])
    tokens = token_loss(
        logprobs_M,
        recorded_M,
        proximal_M,
        constant([item.advantages_M for item in batch]),
        torch.from_numpy(np.repeat(np.arange(len(calls)), calls)).to(logprobs_M.device),
        objective,
        reference_M=reference_M,
    )
    weights_M = constant([np.full(item.sample.num_trained, item.weight) for item in batch])
    loss = (weights_M * tokens.loss_M).sum()
    return MicroLoss(loss=loss, tokens=tokens, logprobs_M=logprobs_M, recorded_M=recorded_M)
