"""An objective becomes arithmetic: the loss of each trained token, before the weights of the rollouts.

    l = mismatch weight * policy loss(ratio, advantage) + kl * k3(pi || reference)

The ratio is pi / mu (`recorded`; no weight) or pi / prox (`decoupled`). The KL term knows no advantage and no mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from manege.trainer.losses.cispo import cispo_loss
from manege.trainer.losses.gspo import gspo_loss
from manege.trainer.losses.kl import k3
from manege.trainer.losses.mismatch import mismatch_weight
from manege.trainer.losses.ppo import ppo_loss
from manege.trainer.objective import Objective

__all__ = ["TokenLoss", "token_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Per trained token; only the loss carries a gradient."""

    loss_M: Tensor
    clipped_M: Tensor
    """True where the clip took the gradient away (cispo: where it bounded the weight), masked tokens apart."""
    masked_M: Tensor
    """True where the mismatch is too large to learn from."""
    weight_M: Tensor
    """The mismatch weight: 1 without a correction, 0 where masked."""
    kl_M: Tensor | None
    """k3 of the policy from the reference; None without one."""


def token_loss(
    logprobs_M: Tensor,
    recorded_M: Tensor,
    proximal_M: Tensor,
    advantages_M: Tensor,
    call_M: Tensor,
    objective: Objective,
    *,
    reference_M: Tensor | None = None,
) -> TokenLoss:
    """`logprobs_M` carries the gradient, the others are constants; `call_M` counts the calls of the micro-batch from 0.

    `proximal_M` is read by `decoupled` only, `reference_M` is needed where the objective has a KL term.
    """
    if objective.ratio == "decoupled":
        old_M = proximal_M
        weight_M, masked_M = mismatch_weight(
            proximal_M,
            recorded_M,
            call_M,
            level=objective.mismatch_level,
            cap=objective.mismatch_cap,
            band=objective.mismatch_band,
        )
    else:
        old_M = recorded_M
        weight_M, masked_M = torch.ones_like(old_M), torch.zeros_like(old_M, dtype=torch.bool)
    log_ratio_M = logprobs_M - old_M
    loss_M, clipped_M = _policy_loss(logprobs_M, log_ratio_M, advantages_M, call_M, objective)
    loss_M = weight_M * loss_M
    kl_M = None
    if objective.kl > 0:
        assert reference_M is not None, "a KL term needs the reference's log-probabilities"
        kl_M = k3(logprobs_M, reference_M)
        loss_M = loss_M + objective.kl * kl_M
    return TokenLoss(
        loss_M=loss_M,
        clipped_M=clipped_M & ~masked_M,
        masked_M=masked_M,
        weight_M=weight_M,
        kl_M=None if kl_M is None else kl_M.detach(),
    )


def _policy_loss(
    logprobs_M: Tensor, log_ratio_M: Tensor, advantages_M: Tensor, call_M: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    low, high = objective.clip_low, objective.clip_high
    if objective.loss == "ppo":
        return ppo_loss(log_ratio_M, advantages_M, clip_low=low, clip_high=high, dual_clip=objective.dual_clip)
    if objective.loss == "cispo":
        return cispo_loss(logprobs_M, log_ratio_M, advantages_M, clip_low=low, clip_high=high)
    return gspo_loss(log_ratio_M, call_M, advantages_M, clip_low=low, clip_high=high)
