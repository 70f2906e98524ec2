"""The plainest attention: each sequence of a flat batch is causal on its own, nothing is cached.

The reference that every faster attention (KV cache, prefix tree) is tested against.
"""

from collections.abc import Sequence

from torch import Tensor, cat
from torch.nn.functional import scaled_dot_product_attention

from manege.model.base import Attend

__all__ = ["causal_attend"]


def causal_attend(lengths: Sequence[int]) -> Attend:
    """Attention over sequences of these lengths, laid out one after the other."""

    def attend(layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        parts = zip(*(flat.transpose(0, 1)[None].split(lengths, dim=2) for flat in (q_NHD, k_NKD, v_NKD)), strict=True)
        outputs = [
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True) for q, k, v in parts
        ]
        return cat(outputs, dim=2)[0].transpose(0, 1)

    return attend
