"""GSPO: one ratio for all tokens of an answer, their geometric mean; it is clipped as a whole.

    s = exp(mean over the call's tokens of log(pi / old));  l = -min(s A, clip(s, 1 - low, 1 + high) A) for each of them

By hand, low = high = 0.2, A = 1, a call of two tokens with ratios 2 and 0.5: s = 1, l = -1 each. PPO would have
clipped the first. The gradient by each token's log pi is -s A = -1: l of both tokens goes through s, half of it each.

Source: arXiv 2507.18071, whose sequence is a whole answer to a prompt. Ours is a call, never a sample: a sample's
length is an accident of the harness. Every token carries l, so that a call counts by its tokens, as the weights expect;
the paper's mean over answers is `rollout_mean` of rollouts with one call. Its clip range is about 3e-4.
"""

from torch import Tensor

from manege.trainer.losses.calls import call_mean
from manege.trainer.losses.ppo import ppo_loss

__all__ = ["gspo_loss"]


def gspo_loss(
    log_ratio_M: Tensor, call_M: Tensor, advantages_M: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The loss, and True where the clip took the gradient away; (M,) each. The paper has no dual clip."""
    log_ratio_M = call_mean(log_ratio_M, call_M)
    return ppo_loss(log_ratio_M, advantages_M, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
