"""PPO's clipped objective, with a bound of its own on each side, and one for bad answers that became likely.

    l = -min(r A, clip(r, 1 - low, 1 + high) A);  where A < 0, l is at most dual * |A|          (r = pi / old)

By hand, low 0.2, high 0.3, dual 3:
    A = 1:   r 0.5 -> -0.5    r 1.2 -> -1.2    r 1.5 -> -1.3, no gradient: it has risen enough
    A = -1:  r 0.5 -> 0.8, no gradient: it has fallen enough    r 2 -> 2    r 5 -> 3, no gradient

Sources: PPO, arXiv 1707.06347, eq. 7; a higher upper bound (DAPO's clip-higher), arXiv 2503.14476; the dual clip,
arXiv 1912.09729.
"""

import torch
from torch import Tensor

__all__ = ["ppo_loss"]


def ppo_loss(
    log_ratio_M: Tensor, advantages_M: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """The loss, and True where a clip took the gradient away; (M,) each."""
    ratio_M = log_ratio_M.exp()
    gain_M = torch.minimum(ratio_M * advantages_M, ratio_M.clamp(1 - clip_low, 1 + clip_high) * advantages_M)
    bad_M = advantages_M < 0
    clipped_M = torch.where(bad_M, ratio_M < 1 - clip_low, (advantages_M > 0) & (ratio_M > 1 + clip_high))
    if dual_clip is not None:
        gain_M = torch.where(bad_M, torch.maximum(gain_M, dual_clip * advantages_M), gain_M)
        clipped_M = clipped_M | (bad_M & (ratio_M > dual_clip))
    return -gain_M, clipped_M
