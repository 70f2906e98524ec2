"""The token-level loss: tensors in, tensors out. The only place where an objective becomes arithmetic.

Shape legend: M trained tokens of a micro-batch, flat.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from manege.trainer.objective import Objective

__all__ = ["TokenLoss", "token_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Per trained token."""

    loss_M: Tensor
    ratio_M: Tensor
    """pi / mu, detached."""
    clipped_M: Tensor
    """True where the clip removed the gradient, detached."""


def token_loss(logprobs_M: Tensor, recorded_M: Tensor, advantages_M: Tensor, objective: Objective) -> TokenLoss:
    """l_t of objective.py. `logprobs_M` carries the gradient; the others are constants."""
    ratio = torch.exp(logprobs_M - recorded_M)
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    gain = torch.minimum(ratio * advantages_M, bounded * advantages_M)
    if objective.dual_clip is not None:
        floor = objective.dual_clip * advantages_M
        gain = torch.where(advantages_M < 0, torch.maximum(gain, floor), gain)
    with torch.no_grad():
        moved_up = (advantages_M > 0) & (ratio > 1 + objective.clip_high)
        moved_down = (advantages_M < 0) & (ratio < 1 - objective.clip_low)
        clipped = moved_up | moved_down
        if objective.dual_clip is not None:
            clipped |= (advantages_M < 0) & (ratio > objective.dual_clip)
    return TokenLoss(loss_M=-gain, ratio_M=ratio.detach(), clipped_M=clipped)
