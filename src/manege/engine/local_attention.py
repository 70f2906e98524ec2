"""Attention of one step of the local engine over its KV cache.

A step computes a few tokens of each of many sequences: one token of those that are being sampled, more of those whose
prompt is being read. All single tokens attend in one call over the dense slice of busy rows (rows between them that
are not part of the step are computed for nothing, which is cheaper than gathering); longer pieces attend one by one.

Shape legend: N tokens of the step, S single ones (they come first), R rows of the slice, H query heads, K key-value
heads, G = H / K, T cached tokens, D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from manege.engine.kv_cache import KvCache, Row

__all__ = ["CachedAttention"]


class CachedAttention:
    """Implements Attend; writes the step's keys and values into the cache on the way."""

    def __init__(self, cache: KvCache, pieces: Sequence[tuple[Row, int]]) -> None:
        """`pieces`: rows with the number of new tokens, pieces of one token first."""
        self._pool = pool = cache.pool_RL2TKD
        device = pool.device
        indexes = [row.index for row, size in pieces for _ in range(size)]
        positions = [row.length + i for row, size in pieces for i in range(size)]
        self._rows_N = torch.tensor(indexes, device=device)
        self.positions_N = torch.tensor(positions, device=device)
        self._num_single = sum(size == 1 for _, size in pieces)
        singles = indexes[: self._num_single]
        self._num_rows = max(singles, default=-1) + 1
        self._dense = singles == list(range(self._num_rows))
        if singles:
            lengths_R = torch.ones(self._num_rows, dtype=torch.long, device=device)
            lengths_R[self._rows_N[: self._num_single]] = self.positions_N[: self._num_single] + 1
            self._num_keys = max(positions[: self._num_single]) + 1
            self._mask_RT = _mask(lengths_R, self._num_keys, pool.dtype)
        self._long: list[tuple[slice, int, Tensor]] = []
        start = self._num_single
        for row, size in pieces[self._num_single :]:
            part = slice(start, start + size)
            mask_nT = _mask(self.positions_N[part] + 1, row.length + size, pool.dtype)
            self._long.append((part, row.index, mask_nT))
            start += size

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        keys_RTKD, values_RTKD = self._pool[:, layer, 0], self._pool[:, layer, 1]
        keys_RTKD[self._rows_N, self.positions_N] = k_NKD
        values_RTKD[self._rows_N, self.positions_N] = v_NKD
        q_NKGD = q_NHD.unflatten(1, (k_NKD.shape[1], -1))
        outputs = []
        if self._num_single:
            outputs.append(self._singles(q_NKGD[: self._num_single], keys_RTKD, values_RTKD, scale))
        for part, index, mask_nT in self._long:
            k, v = keys_RTKD[index, : mask_nT.shape[1]], values_RTKD[index, : mask_nT.shape[1]]
            outputs.append(_long(q_NKGD[part], k, v, mask_nT, scale))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1, 2)

    def _singles(self, q_SKGD: Tensor, keys_RTKD: Tensor, values_RTKD: Tensor, scale: float) -> Tensor:
        # The query heads that share keys act as G queries of one key-value head: no copies of the keys.
        rows_S = self._rows_N[: self._num_single]
        q_RKGD = q_SKGD
        if not self._dense:
            q_RKGD = q_SKGD.new_zeros((self._num_rows, *q_SKGD.shape[1:]))
            q_RKGD[rows_S] = q_SKGD
        k_RKTD = keys_RTKD[: self._num_rows, : self._num_keys].transpose(1, 2)
        v_RKTD = values_RTKD[: self._num_rows, : self._num_keys].transpose(1, 2)
        mask = self._mask_RT[:, None, None]
        out_RKGD = scaled_dot_product_attention(q_RKGD, k_RKTD, v_RKTD, attn_mask=mask, scale=scale)
        return out_RKGD if self._dense else out_RKGD[rows_S]


def _long(q_nKGD: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask_nT: Tensor, scale: float) -> Tensor:
    size, num_kv_heads, group, head_dim = q_nKGD.shape
    q = q_nKGD.transpose(0, 1).reshape(1, num_kv_heads, size * group, head_dim)
    k, v = k_TKD.transpose(0, 1)[None], v_TKD.transpose(0, 1)[None]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask_nT.repeat_interleave(group, 0), scale=scale)
    return out.view(num_kv_heads, size, group, head_dim).transpose(0, 1)


def _mask(lengths_n: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
    """0 where a key may be seen, -inf elsewhere; as numbers, or every layer would convert it again."""
    hidden_nT = torch.arange(num_keys, device=lengths_n.device) >= lengths_n[:, None]
    return torch.zeros(hidden_nT.shape, dtype=dtype, device=lengths_n.device).masked_fill_(hidden_nT, float("-inf"))
