"""Continuous batching: which sequences run, and one step of all of them.

A step is one forward pass over the next token of every sequence that is being sampled and up to `prefill_chunk` tokens
of prompts that are being read. Sequences join and leave at every step. A sequence is its token ids; keys and values
only save work, so one that loses its row (no room, a pause) waits and goes on from its ids.

Not thread-safe: only the worker thread of the engine uses it.
"""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from manege.engine.base import Chunk, Sampling
from manege.engine.constraints import BoolArray, Guide
from manege.engine.decode import DecodeSteps
from manege.engine.kv_cache import KvCache, Row
from manege.engine.local_attention import CachedAttention
from manege.engine.sampling import choose_tokens
from manege.errors import EngineError
from manege.model.base import LanguageModel
from manege.types import FinishReason, IntArray, PolicyVersion

__all__ = ["Batch", "LiveSequence"]

Sink = TypeVar("Sink")


@dataclass(slots=True, eq=False)
class LiveSequence(Generic[Sink]):
    """A prompt and what has been sampled after it."""

    buffer: IntArray
    """Prompt, answer so far, room for the rest of the answer."""
    num_prompt: int
    num_tokens: int
    """Prompt and answer so far."""
    sampling: Sampling
    rng: random.Random
    sink: Sink
    """Where chunks go; not looked at here."""
    guide: Guide | None = None
    """Follows the answer so far; None: unconstrained."""
    row: Row | None = None
    num_cached: int | None = None
    """Prompt tokens that were reused when it first ran."""

    @property
    def tokens(self) -> IntArray:
        return self.buffer[: self.num_tokens]


_Piece: TypeAlias = tuple[LiveSequence[Sink], Row, int]
"""A sequence, its row, and how many of its tokens are computed next."""


class Batch(Generic[Sink]):
    """Waiting and running sequences."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        max_batch: int,
        cache_tokens: int,
        prefill_chunk: int,
        fixed_shapes: bool = False,
    ) -> None:
        """`fixed_shapes`: steps that only decode are computed so that a GPU can replay them (`decode`)."""
        self._model, self._tokenizer = model, tokenizer
        self._max_batch, self._prefill_chunk = max_batch, prefill_chunk
        self._cache = KvCache(model, cache_tokens)
        captures = next(model.module.parameters()).device.type == "cuda"
        self._decode = DecodeSteps(model, self._cache, captures=captures) if fixed_shapes else None
        self.waiting: deque[LiveSequence[Sink]] = deque()
        self.running: list[LiveSequence[Sink]] = []
        self.stats: dict[str, float] = dict.fromkeys(("prefilled", "cached", "sampled", "steps", "busy_s"), 0.0)

    def add(self, sequence: LiveSequence[Sink]) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: LiveSequence[Sink]) -> None:
        """Stop a sequence, wherever it is; one that has ended already is left alone."""
        if sequence in self.running:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def clear(self) -> None:
        """Every running sequence waits, before all others, to go on from its ids; the cache holds no memory."""
        for sequence in reversed(self.running):
            self._requeue(sequence)
        self.running.clear()
        if self._decode is not None:
            self._decode.drop()
        self._cache.drop()

    def outdate(self) -> None:
        """The weights have changed: only running sequences go on over what the old ones have computed."""
        self._cache.outdate()

    @property
    def cache_usage(self) -> float:
        """Share of the rows that running sequences have."""
        return min(1.0, len(self.running) / max(1, len(self._cache.rows)))

    @torch.inference_mode()
    def step(self, version: PolicyVersion) -> list[tuple[LiveSequence[Sink], Chunk | EngineError]]:
        """Compute one step; returns what was sampled, or why a sequence ended without. There must be a sequence."""
        started = time.perf_counter()
        self._make_room()
        self._admit()
        pieces = self._plan()
        if self._decode is not None and all(size == 1 for _, _, size in pieces):
            ready = [sequence for sequence, _, _ in pieces]
            rows, ids = [row for _, row, _ in pieces], [int(sequence.tokens[-1]) for sequence in ready]
            hidden_SE = self._decode.hidden(rows, ids)
            for row in rows:
                row.length += 1
        else:
            ready, hidden_SE = self._mixed(pieces)
        chunks = self._sample(ready, self._model.logits(hidden_SE), version) if ready else []
        self.stats["prefilled"] += sum(size for _, _, size in pieces) - len(ready)
        self.stats["sampled"] += len(ready)
        self.stats["steps"] += 1
        self.stats["busy_s"] += time.perf_counter() - started
        return chunks

    def _mixed(self, pieces: Sequence[_Piece[Sink]]) -> tuple[list[LiveSequence[Sink]], Tensor]:
        """The sequences whose next token can be sampled, and the hidden states that it is sampled from."""
        attention = CachedAttention(self._cache, [(row, size) for _, row, size in pieces])
        ids_N = np.concatenate([sequence.buffer[row.length : row.length + size] for sequence, row, size in pieces])
        device = attention.positions_N.device
        hidden_NE = self._model.hidden(torch.from_numpy(ids_N).to(device, torch.long), attention.positions_N, attention)
        ready, last, end = [], [], 0
        for sequence, row, size in pieces:
            row.length += size
            end += size
            if row.length == sequence.num_tokens:
                ready.append(sequence)
                last.append(end - 1)
        return ready, hidden_NE[last]

    def _make_room(self) -> None:
        next_up = islice(self.waiting, self._max_batch - len(self.running))
        gone = self._cache.grow(max(sequence.num_tokens for sequence in [*self.running, *next_up]))
        for sequence in [sequence for sequence in reversed(self.running) if sequence.row in gone]:
            self.running.remove(sequence)
            self._requeue(sequence)

    def _requeue(self, sequence: LiveSequence[Sink]) -> None:
        sequence.row = None
        if sequence.num_tokens == sequence.num_prompt:
            sequence.num_cached = None
        self.waiting.appendleft(sequence)

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if len(self.running) == self._max_batch or sequence.num_tokens > self._cache.capacity:
                return
            claimed = self._cache.claim(sequence.tokens)
            if claimed is None:
                continue
            sequence.row, num_cached = claimed
            if sequence.num_cached is None:
                sequence.num_cached = num_cached
                self.stats["cached"] += num_cached
            self.waiting.remove(sequence)
            self.running.append(sequence)

    def _plan(self) -> list[_Piece[Sink]]:
        """The next tokens of each running sequence, single ones first, by row."""
        pieces, budget = [], self._prefill_chunk
        for sequence in self.running:
            assert sequence.row is not None
            size = sequence.num_tokens - sequence.row.length
            if size > 1:
                size = min(size, budget)
                budget -= size
            if size:
                pieces.append((sequence, sequence.row, size))
        return sorted(pieces, key=lambda piece: (piece[2] > 1, piece[1].index))

    def _sample(
        self, ready: Sequence[LiveSequence[Sink]], logits_SV: Tensor, version: PolicyVersion
    ) -> list[tuple[LiveSequence[Sink], Chunk | EngineError]]:
        uniforms = [sequence.rng.random() for sequence in ready]
        allowed, failed = _guidance(ready)
        ids, logprobs = choose_tokens(logits_SV, [sequence.sampling for sequence in ready], uniforms, allowed)
        chunks: list[tuple[LiveSequence[Sink], Chunk | EngineError]] = []
        for index, (sequence, id, logprob) in enumerate(zip(ready, ids, logprobs, strict=True)):
            if index in failed:
                self._leave(sequence)
                chunks.append((sequence, failed[index]))
                continue
            is_first = sequence.num_tokens == sequence.num_prompt
            num_cached = sequence.num_cached if is_first and sequence.num_cached else 0
            sequence.buffer[sequence.num_tokens] = id
            sequence.num_tokens += 1
            assert sequence.row is not None
            old_cache = sequence.row.outdated
            finish = self._finish_reason(sequence, id)
            if finish:
                self._leave(sequence)
            chunk = Chunk(
                ids=[id],
                logprobs=[logprob],
                version=version,
                old_cache=old_cache,
                finish_reason=finish,
                num_cached=num_cached,
            )
            chunks.append((sequence, chunk))
        return chunks

    def _finish_reason(self, sequence: LiveSequence[Sink], id: int) -> FinishReason | None:
        sampling = sequence.sampling
        if id in sampling.stop_ids:
            return FinishReason.STOP
        if sequence.guide is not None and sequence.guide.advance(id):
            return FinishReason.STOP
        if sampling.stop_strings:
            answer = sequence.tokens[sequence.num_prompt :].tolist()
            text = self._tokenizer.decode(answer, skip_special_tokens=False)
            if any(stop in text for stop in sampling.stop_strings):
                return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_tokens == len(sequence.buffer) else None

    def _leave(self, sequence: LiveSequence[Sink]) -> None:
        assert sequence.row is not None
        self._cache.release(sequence.row, sequence.tokens)
        sequence.row = None
        self.running.remove(sequence)


def _guidance(sequences: Sequence[LiveSequence[Sink]]) -> tuple[dict[int, BoolArray], dict[int, EngineError]]:
    """By index, for those that are constrained: what is allowed next, or why that cannot be said."""
    allowed, failed = {}, {}
    for index, sequence in enumerate(sequences):
        if sequence.guide is not None:
            try:
                allowed[index] = sequence.guide.allowed_V()
            except EngineError as error:
                failed[index] = error
    return allowed, failed
