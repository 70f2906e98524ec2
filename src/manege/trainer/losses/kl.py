"""k3: an estimate of a divergence from one sampled token, never negative and of small variance.

    KL(q || p) ~ p / q - 1 - log(p / q) for a token sampled from q

By hand: log q = -1, log p = -1 -> 0;  p / q = 2 -> 2 - 1 - 0.693 = 0.307;  p / q = 0.5 -> 0.5 - 1 + 0.693 = 0.193.

Source: http://joschu.net/blog/kl-approx.html; as a loss towards a frozen reference: GRPO, arXiv 2402.03300, eq. 4.
As a loss its gradient by log q is 1 - p / q, in expectation under q that of KL(p || q): it, too, is zero only where
both agree.
"""

from torch import Tensor

__all__ = ["k3"]


def k3(sampled_M: Tensor, other_M: Tensor) -> Tensor:
    """Per token, in nats, from log-probabilities under the policy that sampled and the other one. (M,)"""
    log_ratio_M = other_M - sampled_M
    return log_ratio_M.exp() - 1 - log_ratio_M
