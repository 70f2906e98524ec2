"""CISPO: the ratio is a weight that is clipped, and every token keeps a gradient.

    l = -sg[clip(r, 1 - low, 1 + high)] A log pi          (r = pi / old; sg: no gradient through it)

By hand, low 0.2, high 0.3, A = 1: the gradient by log pi is -0.8 at r 0.5, -1.1 at r 1.1, -1.3 at r 5.

Source: MiniMax-M1, arXiv 2506.13585. The paper clips above only; so does `clip_low = 1` or more. We clip below as well
where `clip_low` says so. The weight is bounded, so a dual clip has nothing to add.
"""

from torch import Tensor

__all__ = ["cispo_loss"]


def cispo_loss(
    logprobs_M: Tensor, log_ratio_M: Tensor, advantages_M: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The loss, and True where the weight was clipped; (M,) each."""
    ratio_M = log_ratio_M.detach().exp()
    weight_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    return -weight_M * advantages_M * logprobs_M, weight_M != ratio_M
