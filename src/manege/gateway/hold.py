"""The gate that model calls pass: open, or paused while weights change.

A pause holds new calls and waits for those in flight; then the engine pauses, so that calls which did not end in time
keep their place and go on after `resume`, under the new version. Weights change only while the engine is paused.

Concurrency: one event loop; `_lock` orders everything that is asked of the engine. No await stands between the check
of `paused` and the count of a call as in flight.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from manege.engine.base import Engine, Weights
from manege.errors import ConflictError, UnavailableError
from manege.logs import get_logger, kv
from manege.store.sql import SqlStore
from manege.types import PolicyVersion

__all__ = ["HOLD_S", "Gate"]

HOLD_S = 280.0
"""How long a plain call waits for the end of a pause: under the 300 s after which proxies and clients commonly give up.
A stream waits as long as it must, with heartbeats."""

_log = get_logger("gateway")


class Gate:
    """Counts calls in flight; holds new ones while paused."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._engine_paused = False
        self._closed = False
        self.paused = False
        self.num_in_flight = 0
        self.num_held = 0

    @asynccontextmanager
    async def enter(self, hold_s: float | None = HOLD_S) -> AsyncIterator[None]:
        """Run a model call inside. Raises UnavailableError after `hold_s` of a pause (None: never), or at shutdown."""
        if self.paused:
            await self._held(hold_s)
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if self.num_in_flight == 0:
                self._idle.set()

    async def pause(self, drain_s: float | None) -> None:
        """Hold new calls, let those in flight end for at most `drain_s`, then pause the engine. With None, only hold:
        the caller watches the calls in flight (Agent Lightning's trainer). Raises ConflictError if resumed meanwhile.
        """
        self.paused = True
        self._open.clear()
        if drain_s is None:
            return
        await self._drain(drain_s)
        async with self._lock:
            if not self.paused:
                raise ConflictError("the gateway was resumed while a pause was draining it; pause again")
            await self._engine.pause()
            self._engine_paused = True

    async def resume(self) -> None:
        """Let everything go on. Safe to call when not paused."""
        self.paused = False
        # A pause that still drains must see that it was overtaken.
        self._idle.set()
        async with self._lock:
            try:
                await self._engine.resume()
                self._engine_paused = False
            finally:
                # Should the engine be gone, held calls learn it from the engine, now.
                if not self.paused:
                    self._open.set()

    async def publish(self, store: SqlStore, weights: Weights) -> PolicyVersion:
        """Count a new version and load its weights. Raises ConflictError unless the engine is paused."""
        async with self._lock:
            if not self._engine_paused:
                raise ConflictError(
                    "weights change only while the gateway is paused: POST /proxy/pause with drain_s first"
                )
            version = await store.publish_version()
            await self._engine.load(weights, version)
            return version

    def close(self) -> None:
        """At shutdown: calls that wait are refused instead of held."""
        self._closed = True
        self._open.set()

    async def _drain(self, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s):
                while self.num_in_flight and self.paused:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            _log.info(kv("pausing with calls in flight", num_in_flight=self.num_in_flight, drain_s=drain_s))

    async def _held(self, hold_s: float | None) -> None:
        self.num_held += 1
        try:
            async with asyncio.timeout(hold_s):
                while self.paused and not self._closed:
                    await self._open.wait()
        except TimeoutError:
            raise UnavailableError(
                f"the gateway has been paused for {hold_s:.0f} s (weights are being changed); try again"
            ) from None
        finally:
            self.num_held -= 1
        if self._closed:
            raise UnavailableError("the gateway is shutting down; try again when it is back")
