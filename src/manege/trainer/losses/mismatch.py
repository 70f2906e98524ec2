"""The correction of `ratio = decoupled`: how far the policy at the start of the update is from the one that sampled.

    d = prox / mu, of a token, or its geometric mean over the token's call;  weight = min(d, cap), and 0 (masked) where
    d leaves [1 / band, band]

By hand, cap 2, band 5: d 0.1 -> masked, 0.5 -> 0.5, 3 -> 2, 6 -> masked. Two tokens with d 6 and 1.5 are, at the level
of their call, both 3 -> 2.

Sources: the decoupled objective, AReaL, arXiv 2505.24298 (from arXiv 2110.00641); the truncated weight, "Your efficient
RL framework secretly brings you off-policy RL training" (F. Yao et al., https://fengyao.notion.site/off-policy-rl); the
band on both sides, IcePop (Ring-1T, arXiv 2510.18855), which masks and does not truncate. We do both. A masked token
still counts in the weights of its rollout: those depend on rollouts only, never on the present policy.
"""

import torch
from torch import Tensor

from manege.trainer.losses.calls import call_mean

__all__ = ["mismatch_weight"]


def mismatch_weight(
    proximal_M: Tensor, recorded_M: Tensor, call_M: Tensor, *, level: str, cap: float, band: float
) -> tuple[Tensor, Tensor]:
    """The weight, and True where the token is masked; (M,) each, without gradient. `level`: token or call."""
    distance_M = proximal_M.detach() - recorded_M
    if level == "call":
        distance_M = call_mean(distance_M, call_M)
    distance_M = distance_M.exp()
    masked_M = (distance_M < 1 / band) | (distance_M > band)
    return torch.where(masked_M, 0.0, distance_M.clamp(max=cap)), masked_M
