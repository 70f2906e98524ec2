"""The answers that a served engine is giving: they can be ended at once, or waited for, as vLLM's pause modes ask.

Requests come in through `generate`, which is the engine's own but for that. `abort` ends what is under way with
FinishReason.ABORT; a chunk that its reader has not taken yet is lost with it. What comes later waits in the paused
engine. `drain` lets running answers end and holds new ones here until `resume`.

One event loop; nothing here is shared with threads.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from manege.engine.base import Chunk, Engine, Sampling
from manege.types import FinishReason, PolicyVersion

__all__ = ["UnderWay"]


class UnderWay:
    """Stands between the server and its engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._num_live = 0
        self._num_aborts = 0
        self._waits: set[asyncio.Timeout] = set()
        """One for each answer whose next chunk is waited for."""

    @property
    def is_held(self) -> bool:
        """New requests wait, whatever the engine does."""
        return not self._open.is_set()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """See Engine."""
        await self._open.wait()
        self._num_live += 1
        self._idle.clear()
        num_aborts = self._num_aborts
        try:
            async with aclosing(self._engine.generate(prompt_ids, sampling)) as chunks:
                while num_aborts == self._num_aborts and (chunk := await self._next(chunks)):
                    yield chunk
                    if chunk.finish_reason:
                        return
            yield Chunk(ids=(), logprobs=(), version=PolicyVersion(0), finish_reason=FinishReason.ABORT)
        finally:
            self._num_live -= 1
            if not self._num_live:
                self._idle.set()

    async def abort(self) -> None:
        """Pause the engine and end every answer."""
        await self._engine.pause()
        self._num_aborts += 1
        for wait in self._waits:
            wait.reschedule(0)

    async def drain(self) -> None:
        """Pause the engine when the answers under way have ended, unless it is resumed before."""
        self._open.clear()
        await self._idle.wait()
        if self.is_held:
            await self._engine.pause()

    async def resume(self) -> None:
        """Go on, and let in what was held."""
        self._open.set()
        await self._engine.resume()

    async def _next(self, chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
        """None: aborted."""
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                return await anext(chunks)
        except TimeoutError:
            if not wait.expired():
                raise
            return None
        finally:
            self._waits.discard(wait)
