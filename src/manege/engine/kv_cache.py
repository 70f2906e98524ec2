"""Keys and values of running sequences and of prefixes that may come back.

The cache is a table of rows of equal capacity; a row holds the keys and values of one token sequence. A row is busy
while its sequence runs; afterwards it stays as a reusable prefix until it is the least recently used one. A new
sequence takes over the row that it extends (the next turn of a conversation), or copies the longest prefix that any
row has (the same system prompt, the same task). Busy rows are kept at the lowest indexes, so that attention over a
batch is one call over a dense slice: a row is moved in 1 ms, gathering rows would double the cost of every step.

A row has one position more than its capacity, which holds nothing: where a computation for all rows writes for those
that are not part of it (`decode`). Rows grow together: a longer sequence doubles the capacity and halves their number;
until there is a first one, the cache has no rows and no memory. What is computed never outlives its weights, but for
busy rows whose sequences go on over it all the same: these are `outdated`, serve no other sequence and hold nothing
afterwards. Only the worker thread of the engine touches the cache.

Shape legend: R rows, L layers, T capacity, K key-value heads, D head size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manege.model.base import LanguageModel
from manege.types import IntArray

__all__ = ["KvCache", "Row"]

_FIRST_CAPACITY = 256
_WORTH_WAITING = 8
"""Tokens that a row must promise beyond what is computed before a sequence waits for them."""


@dataclass(slots=True, eq=False)
class Row:
    """One sequence in the cache."""

    index: int
    tokens: IntArray
    """What the row holds or, while it is busy, will hold."""
    length: int = 0
    """Tokens whose keys and values are computed."""
    busy: bool = False
    outdated: bool = False
    """Older weights computed some of it."""
    last_used: int = 0


class KvCache:
    """Rows and their tensor, `pool_RL2TKD` (2: keys, values)."""

    def __init__(self, model: LanguageModel, max_tokens: int) -> None:
        parameter = next(model.module.parameters())
        self._dtype, self._device = parameter.dtype, parameter.device
        self._model = model
        self._max_tokens = max_tokens
        self._clock = 0
        self.drop()

    def drop(self) -> None:
        """Forget everything and hold no memory until the next `grow`."""
        self.capacity = 0
        self.pool_RL2TKD = torch.empty(0)
        self.rows: list[Row] = []
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def outdate(self) -> None:
        """The weights have changed: forget what no running sequence needs."""
        for row in self.rows:
            if row.busy:
                row.outdated = row.length > 0
            else:
                _empty(row)

    def grow(self, num_tokens: int) -> list[Row]:
        """Make room for sequences of that length; returns busy rows that had to go."""
        if num_tokens <= self.capacity:
            return []
        while self.capacity < num_tokens:
            self.capacity = min(2 * self.capacity or _FIRST_CAPACITY, self._max_tokens)
        old_RL2TKD, old_rows = self.pool_RL2TKD, self.rows
        self.pool_RL2TKD = self._allocate(self.capacity)
        self.rows = self._fresh_rows()
        ranked = sorted(old_rows, key=lambda row: (row.busy, row.last_used), reverse=True)
        kept, gone = ranked[: len(self.rows)], ranked[len(self.rows) :]
        for index, row in enumerate(kept):
            self.pool_RL2TKD[index, :, :, : row.length] = old_RL2TKD[row.index, :, :, : row.length]
            row.index = index
            self.rows[index] = row
        return [row for row in gone if row.busy]

    def claim(self, tokens: IntArray) -> tuple[Row, int] | None:
        """A row for a sequence and the number of its tokens that are computed already, at most all but the last.
        None: wait, since all rows are busy or a running sequence is computing a prefix of this one."""
        idle = [row for row in self.rows if not row.busy]
        if not idle:
            return None
        source, cached, promised = None, 0, 0
        for row in self.rows:
            if row.outdated:
                continue
            common = _common_prefix(row.tokens, tokens[:-1])
            promised = max(promised, common)
            if min(common, row.length) > cached:
                source, cached = row, min(common, row.length)
        if promised >= cached + _WORTH_WAITING:
            return None
        if source is None or source.busy or cached < source.length:
            row = min(idle, key=lambda row: (row.last_used, row.index))
        else:
            row = source
        if row is not source:
            row.length = 0
        self._exchange(row, min(idle, key=lambda row: row.index))
        if source is not None and row is not source:
            self.pool_RL2TKD[row.index, :, :, :cached] = self.pool_RL2TKD[source.index, :, :, :cached]
            source.last_used = self._tick()
        row.tokens, row.length, row.busy = tokens, cached, True
        return row, cached

    def release(self, row: Row, tokens: IntArray) -> None:
        """The sequence has ended or is taken out; what is computed of it stays reusable, if it is not outdated."""
        row.tokens = tokens[: row.length].copy()
        if row.outdated:
            _empty(row)
        row.busy = False
        row.last_used = self._tick()

    def _exchange(self, left: Row, right: Row) -> None:
        if left is right:
            return
        kept = self.pool_RL2TKD[left.index, :, :, : left.length].clone()
        self.pool_RL2TKD[left.index, :, :, : right.length] = self.pool_RL2TKD[right.index, :, :, : right.length]
        self.pool_RL2TKD[right.index, :, :, : left.length] = kept
        left.index, right.index = right.index, left.index

    def _fresh_rows(self) -> list[Row]:
        return [Row(index, np.empty(0, np.int32)) for index in range(len(self.pool_RL2TKD))]

    def _allocate(self, capacity: int) -> Tensor:
        num_rows = max(1, self._max_tokens // capacity)
        shape = (num_rows, self._model.num_layers, 2, capacity + 1, self._model.num_kv_heads, self._model.head_dim)
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # Zeros, since masked entries are multiplied by 0 and must not be NaN; from numpy, since that takes memory only
        # when it is written to, and most rows never are.
        num_bytes = int(np.prod(shape)) * self._dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(self._dtype).view(shape)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _empty(row: Row) -> None:
    row.tokens, row.length, row.outdated = row.tokens[:0], 0, False


def _common_prefix(left: IntArray, right: IntArray) -> int:
    size = min(len(left), len(right))
    different = left[:size] != right[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size
