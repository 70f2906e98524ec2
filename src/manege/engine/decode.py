"""Decoding at fixed shapes, which a GPU can record once and replay: one launch instead of some hundred per token.

A step computes one token for every row of a dense slice of the KV cache, for rows that decode nothing too: these write
to the row's spare position, which nobody reads. The numbers of rows and of keys are rounded up to powers of two, so
that few shapes occur. A shape that has come up WORTH_CAPTURE times is captured as a CUDA graph
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs); until then, and on the CPU always, the same code
runs eagerly.

To measure on a GPU: ms per step at batch 1, 8, 64 and contexts of 1k, 8k, 32k, with and without `captures`, against the
time to read weights and keys once (bytes / bandwidth); and ms per capture, since every update drops them all.

Shape legend: B rows of the slice, T keys, S sequences of the step, H query heads, K key-value heads, G = H / K, D head
size, E model width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from manege.engine.kv_cache import KvCache, Row
from manege.logs import get_logger, kv
from manege.model.base import LanguageModel

__all__ = ["DecodeSteps"]

WORTH_CAPTURE = 8
"""A capture takes about as long as this many eager steps."""
_FEWEST_KEYS = 256

_log = get_logger("engine")


class DecodeSteps:
    """One `_Step` per shape. They refer to the cache's memory: `drop` them before it is freed."""

    def __init__(self, model: LanguageModel, cache: KvCache, *, captures: bool) -> None:
        """`captures`: as CUDA graphs; the model's code must not wait for the device then."""
        self._model, self._cache, self._captures = model, cache, captures
        self.drop()

    def drop(self) -> None:
        """Hold no memory until the next step."""
        self._steps: dict[tuple[int, int], _Step] = {}
        self._pool_RL2TKD = self._cache.pool_RL2TKD

    def hidden(self, rows: Sequence[Row], ids: Sequence[int]) -> Tensor:
        """(S, E): of the next token of each row, whose key and value are then in the cache."""
        if self._pool_RL2TKD is not self._cache.pool_RL2TKD:
            self.drop()
        num_rows = min(_power_of_two(max(row.index for row in rows) + 1), len(self._cache.rows))
        num_keys = min(_power_of_two(max(row.length for row in rows) + 1, _FEWEST_KEYS), self._cache.capacity)
        step = self._steps.get((num_rows, num_keys))
        if step is None:
            step = self._steps[num_rows, num_keys] = _Step(self._model, self._pool_RL2TKD, num_rows, num_keys)
        if self._captures and step.num_runs == WORTH_CAPTURE:
            self._captures = step.capture()
        inputs_2B = torch.zeros(2, num_rows, dtype=torch.long)
        inputs_2B[1] = self._cache.capacity
        for row, id in zip(rows, ids, strict=True):
            inputs_2B[0, row.index], inputs_2B[1, row.index] = id, row.length
        return step.run(inputs_2B)[[row.index for row in rows]]


class _Step:
    def __init__(self, model: LanguageModel, pool_RL2TKD: Tensor, num_rows: int, num_keys: int) -> None:
        self._model, self._pool_RL2TKD = model, pool_RL2TKD
        self._num_keys = num_keys
        self.num_runs = 0
        # Where a graph reads and writes: the same memory at every replay.
        self._inputs_2B = torch.zeros(2, num_rows, dtype=torch.long, device=pool_RL2TKD.device)
        self._hidden_BE = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, inputs_2B: Tensor) -> Tensor:
        """(B, E); overwritten by the next run. Of ids and positions."""
        self._inputs_2B.copy_(inputs_2B)
        self.num_runs += 1
        if self._graph is None:
            return self._compute()
        self._graph.replay()
        return self._hidden_BE

    def capture(self) -> bool:
        """Returns whether that can be done."""
        try:
            # On another stream first, as torch asks for: libraries get their workspaces there. To compute a step twice
            # changes nothing.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._compute()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._hidden_BE = self._compute()
        except RuntimeError as error:
            _log.warning(kv("decode steps cannot be captured as CUDA graphs and run eagerly", reason=error))
            return False
        self._graph = graph
        return True

    def _compute(self) -> Tensor:
        ids_B, positions_B = self._inputs_2B
        attend = _RowAttention(self._pool_RL2TKD, positions_B, self._num_keys)
        return self._model.hidden(ids_B, positions_B, attend)


class _RowAttention:
    """Implements Attend for one token of each of the first B rows of a cache (N = B); no shape depends on a value."""

    def __init__(self, pool_RL2TKD: Tensor, positions_B: Tensor, num_keys: int) -> None:
        self._pool_BL2TKD = pool_RL2TKD[: len(positions_B)]
        self._positions_B, self._num_keys = positions_B, num_keys
        self._rows_B = torch.arange(len(positions_B), device=positions_B.device)
        hidden_BT = torch.arange(num_keys, device=positions_B.device) > positions_B[:, None]
        mask_BT = torch.zeros(hidden_BT.shape, dtype=pool_RL2TKD.dtype, device=positions_B.device)
        self._mask_B11T = mask_BT.masked_fill_(hidden_BT, float("-inf"))[:, None, None]

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        keys_BTKD, values_BTKD = self._pool_BL2TKD[:, layer, 0], self._pool_BL2TKD[:, layer, 1]
        keys_BTKD[self._rows_B, self._positions_B] = k_NKD
        values_BTKD[self._rows_B, self._positions_B] = v_NKD
        k_BKTD, v_BKTD = (x[:, : self._num_keys].transpose(1, 2) for x in (keys_BTKD, values_BTKD))
        q_BKGD = q_NHD.unflatten(1, (k_NKD.shape[1], -1))
        out_BKGD = scaled_dot_product_attention(q_BKGD, k_BKTD, v_BKTD, attn_mask=self._mask_B11T, scale=scale)
        return out_BKGD.flatten(1, 2)


def _power_of_two(number: int, least: int = 1) -> int:
    """The next one."""
    return max(least, 1 << (number - 1).bit_length())
