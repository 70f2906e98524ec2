"""Averages over the trained tokens of one call: what "sequence level" means here.

A call is what the policy said in one go. A sample is as long as its harness happened to make it, so a ratio per sample
would depend on how a rollout falls apart.
"""

import torch
from torch import Tensor

__all__ = ["call_mean"]


def call_mean(values_M: Tensor, call_M: Tensor) -> Tensor:
    """The mean over the token's call, for every token: values 1 3 5 of calls 0 0 1 give 2 2 5. (M,)"""
    zeros_C = values_M.new_zeros(int(call_M.max()) + 1)
    sums_C = zeros_C.index_add(0, call_M, values_M)
    sizes_C = zeros_C.index_add(0, call_M, torch.ones_like(values_M))
    return (sums_C / sizes_C).index_select(0, call_M)
