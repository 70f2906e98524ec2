"""Attention over the nodes of a prefix tree, as few batched kernels per layer as possible.

Every segment of the tree sees its prefix nodes and, causally, itself. Segments of like size are padded to one batch
(a bucket): their keys and values are gathered by node index, so that the work is that of the real prefixes, not of
all pairs of nodes. Query heads that share a key-value head are folded into the query length. A long segment attends
alone and without a mask in memory, which would grow with the square of its length: on GPUs that is flash attention.

Shape legend: N nodes, S segments of a bucket, M padded segment length, C padded length of prefix + segment (of a long
one: not padded), H query heads, K key-value heads, G = H / K, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from manege.trainer.algo.tree import PrefixTree, Segment

__all__ = ["TreeAttention"]

_LONG = 256
"""Nodes of a segment that attends alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    query_SM: Tensor
    """Node of each query; padding repeats node 0."""
    key_SC: Tensor
    """Node of each key; padding repeats node 0 and is masked."""
    bias_S1MC: Tensor
    """0 where a query sees a key, -inf elsewhere."""
    valid: Tensor
    """Flat positions of real queries in (S * M)."""
    nodes: Tensor
    """Their nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    start: int
    stop: int
    key_C: Tensor
    """Node of each key: those of the prefix, then its own."""


class TreeAttention:
    """An `Attend` over one tree; made once per micro-batch and used by every layer."""

    def __init__(self, tree: PrefixTree, *, device: torch.device, dtype: torch.dtype) -> None:
        self._num_nodes = len(tree.ids_N)
        short = [segment for segment in tree.segments if segment.stop - segment.start < _LONG]
        self._buckets = [_bucket(segments, device, dtype) for segments in _like_sizes(short)]
        self._alone = [_alone(segment, device) for segment in tree.segments if segment.stop - segment.start >= _LONG]
        order = torch.cat(
            [
                *(bucket.nodes for bucket in self._buckets),
                *(torch.arange(each.start, each.stop, device=device) for each in self._alone),
            ]
        )
        self._restore = torch.empty_like(order)
        self._restore[order] = torch.arange(len(order), device=device)

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        num_heads, head_dim = q_NHD.shape[1:]
        flat_q, flat_k, flat_v = (x.reshape(self._num_nodes, -1) for x in (q_NHD, k_NKD, v_NKD))
        outputs = []
        for bucket in self._buckets:
            size_s, size_m = bucket.query_SM.shape
            size_c, size_k = bucket.key_SC.shape[1], k_NKD.shape[1]
            group = num_heads // size_k
            q = flat_q.index_select(0, bucket.query_SM.flatten()).view(size_s, size_m, size_k, group, head_dim)
            q = q.permute(0, 2, 3, 1, 4).reshape(size_s, size_k, group * size_m, head_dim)
            keys = bucket.key_SC.flatten()
            k = flat_k.index_select(0, keys).view(size_s, size_c, size_k, head_dim).transpose(1, 2)
            v = flat_v.index_select(0, keys).view(size_s, size_c, size_k, head_dim).transpose(1, 2)
            bias = bucket.bias_S1MC.expand(-1, group, -1, -1).reshape(size_s, 1, group * size_m, size_c)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
            out = out.view(size_s, size_k, group, size_m, head_dim).permute(0, 3, 1, 2, 4)
            outputs.append(out.reshape(size_s * size_m, -1).index_select(0, bucket.valid))
        for each in self._alone:
            outputs.append(_attend_alone(each, q_NHD, k_NKD, v_NKD, scale).flatten(1))
        return torch.cat(outputs).index_select(0, self._restore).view(self._num_nodes, num_heads, head_dim)


def _attend_alone(each: _Alone, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
    """(M, H, D)."""
    q_1HMD = q_NHD[each.start : each.stop].transpose(0, 1)[None]
    group = q_NHD.shape[1] // k_NKD.shape[1]
    # By hand: not every kernel takes fewer key-value heads than query heads together with this kind of mask.
    k_1HCD, v_1HCD = (
        x.index_select(0, each.key_C).repeat_interleave(group, 1).transpose(0, 1)[None] for x in (k_NKD, v_NKD)
    )
    mask = causal_lower_right(each.stop - each.start, len(each.key_C))
    out_1HMD = F.scaled_dot_product_attention(q_1HMD, k_1HCD, v_1HCD, attn_mask=mask, scale=scale)
    return out_1HMD[0].transpose(0, 1)


def _alone(segment: Segment, device: torch.device) -> _Alone:
    key = np.concatenate([segment.prefix, np.arange(segment.start, segment.stop)])
    return _Alone(start=segment.start, stop=segment.stop, key_C=torch.from_numpy(key).to(device))


def _like_sizes(segments: Sequence[Segment]) -> Sequence[Sequence[Segment]]:
    """Segments whose own length and whole length round up to the same powers of two."""
    buckets: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        own = segment.stop - segment.start
        size = (own.bit_length(), (own + len(segment.prefix)).bit_length())
        buckets.setdefault(size, []).append(segment)
    return list(buckets.values())


def _bucket(segments: Sequence[Segment], device: torch.device, dtype: torch.dtype) -> _Bucket:
    own = [segment.stop - segment.start for segment in segments]
    size_m = max(own)
    size_c = max(length + len(segment.prefix) for length, segment in zip(own, segments, strict=True))
    query = np.zeros((len(segments), size_m), np.int64)
    key = np.zeros((len(segments), size_c), np.int64)
    bias = np.full((len(segments), size_m, size_c), -np.inf, np.float32)
    valid = []
    for row, (segment, length) in enumerate(zip(segments, own, strict=True)):
        start = len(segment.prefix)
        nodes = np.arange(segment.start, segment.stop)
        query[row, :length] = nodes
        key[row, :start] = segment.prefix
        key[row, start : start + length] = nodes
        bias[row, :, :start] = 0
        bias[row, :, start : start + length] = np.where(np.tri(size_m, length, dtype=np.bool_), 0, -np.inf)
        valid.append(row * size_m + np.arange(length))
    return _Bucket(
        query_SM=torch.from_numpy(query).to(device),
        key_SC=torch.from_numpy(key).to(device),
        bias_S1MC=torch.from_numpy(bias[:, None]).to(device, dtype),
        valid=torch.from_numpy(np.concatenate(valid)).to(device),
        nodes=torch.from_numpy(np.concatenate([query[r, :n] for r, n in enumerate(own)])).to(device),
    )
