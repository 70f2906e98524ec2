"""An answer over several requests: one that a pause cuts goes on with a request for the rest. Pure, no sockets.

The next request has the prompt and the ids so far, and room for what is left; its seed is another one, since the same
would draw the same numbers again. What comes of it is given on as if there had been no cut.

A grammar cannot be entered in the middle, so a constrained answer that is cut begins anew, and its chunks are given on
at its end. A stop string ends an answer only if all of it comes after the last cut: the engine sees no more.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from manege.engine.base import Chunk, Sampling
from manege.engine.routed_experts import joined
from manege.errors import EngineError
from manege.types import FinishReason

__all__ = ["PartialAnswer"]

_MAX_FRUITLESS = 5
"""Requests in a row that are aborted without a token and without a pause: then no pause is what aborts them."""


class PartialAnswer:
    """What came so far, and what to ask for next: `request`, `add` its chunks, `end_request`, until it `is_whole`."""

    def __init__(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self.is_whole = False
        self._prompt_ids, self._sampling = prompt_ids, sampling
        self._ids: list[int] = []
        self._num_before = 0
        """Ids when the present request was made."""
        self._held: list[Chunk] = []
        self._num_cached: int | None = None
        """As the first request said: later ones know the answer's own ids too."""
        self._num_fruitless = 0
        self._routed_experts: str | None = None

    def request(self) -> tuple[Sequence[int], Sampling]:
        """Prompt and sampling of the next request."""
        self._num_before = num_ids = len(self._ids)
        seed = self._sampling.seed
        if num_ids and seed is not None:
            seed = random.Random(f"{seed} {num_ids}").getrandbits(31)
        limit = self._sampling.max_new_tokens - num_ids
        return [*self._prompt_ids, *self._ids], replace(self._sampling, max_new_tokens=limit, seed=seed)

    def add(self, chunk: Chunk) -> Sequence[Chunk]:
        """The next chunk of the present request; returns those to give on."""
        self._ids += chunk.ids
        if chunk.finish_reason:
            chunk = self._whole_or_cut(chunk)
        if chunk.finish_reason is FinishReason.ABORT:
            return ()
        if self._sampling.constraint is None:
            return [chunk]
        self._held.append(chunk)
        return self._held if self.is_whole else ()

    def end_request(self, *, by_pause: bool) -> None:
        """All its chunks were added. `by_pause`: the engine was paused meanwhile. Raises EngineError if the answer gets
        nowhere."""
        if by_pause or len(self._ids) > self._num_before:
            self._num_fruitless = 0
            return
        self._num_fruitless += 1
        if self._num_fruitless == _MAX_FRUITLESS and not self.is_whole:
            raise EngineError(f"the engine aborted an answer {_MAX_FRUITLESS} times in a row; see its log")

    def _whole_or_cut(self, last: Chunk) -> Chunk:
        if self._num_cached is None:
            self._num_cached = last.num_cached
        self._routed_experts = joined(self._routed_experts, last.routed_experts)
        last = replace(last, num_cached=self._num_cached, routed_experts=self._routed_experts)
        if last.finish_reason is not FinishReason.ABORT:
            self.is_whole = True
        elif len(self._ids) >= self._sampling.max_new_tokens:
            self.is_whole = True
            last = replace(last, finish_reason=FinishReason.LENGTH)
        elif self._sampling.constraint is not None:
            self._ids.clear()
            self._held.clear()
            self._routed_experts = None
        return last
