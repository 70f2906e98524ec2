"""The gate that model calls pass: open, or closed while weights change (`pauses.py` decides when).

A closed gate holds new calls; those that are inside go on. What is inside and what waits is known with its age, and
what waited with its number and time.

Concurrency: one event loop. No await stands between the check of `paused` and the count of a call as in flight.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from manege.errors import UnavailableError

__all__ = ["HOLD_S", "Gate", "Pause"]

HOLD_S = 280.0
"""How long a plain call waits for the end of a pause: under the 300 s after which proxies and clients commonly give up.
A stream waits as long as it must, with heartbeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Why new calls wait, as it is kept in the store."""

    id: str
    reason: str | None
    since_s: float
    keep: bool = False
    """Calls that were still in flight go on over the keys and values that they have."""
    engine_paused: bool = False
    """Calls that were still in flight wait in their engine."""
    version: int | None = None
    """Of the weights that were published in it."""


class Gate:
    """Counts calls in flight; holds new ones while a pause lasts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds since the epoch."""
        self._clock = clock
        self._open = asyncio.Event()
        self._open.set()
        self._settled = asyncio.Event()
        self._closed = False
        self._in_flight: dict[object, float] = {}
        self._held: dict[object, float] = {}
        self._held_s = self._paused_s = 0.0
        """Of the calls, and of the pauses, that wait no more."""
        self._closed_s = 0.0
        """Since when it is closed, if it is."""
        self.held_total = 0
        """Calls that ever waited for the end of a pause, however it ended for them."""
        self.pause: Pause | None = None
        """For which it is closed."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called when the last call in flight has ended during a pause."""

    @property
    def paused(self) -> bool:
        """Whether new calls are held."""
        return self.pause is not None

    def paused_for(self, pause_id: str) -> bool:
        """Whether this pause lasts."""
        return self.pause is not None and self.pause.id == pause_id

    @property
    def num_in_flight(self) -> int:
        """Calls inside."""
        return len(self._in_flight)

    @property
    def num_held(self) -> int:
        """Calls that wait for the end of a pause."""
        return len(self._held)

    @property
    def held_s(self) -> float:
        """Seconds that calls have waited in all, those that still wait included."""
        return self._held_s + len(self._held) * self._clock() - sum(self._held.values())

    def open_s(self) -> float:
        """A clock that stands still while a pause lasts; only its differences mean something."""
        return (self._closed_s if self.paused else self._clock()) - self._paused_s

    def oldest(self) -> dict[str, float]:
        """Since when the oldest of each kind is here, in seconds since the epoch: `call_in_flight`, `call_held`,
        `pause`; kinds that there are none of are left out."""
        kinds = {"call_in_flight": self._in_flight, "call_held": self._held}
        oldest = {kind: next(iter(calls.values())) for kind, calls in kinds.items() if calls}
        return oldest if self.pause is None else {**oldest, "pause": self.pause.since_s}

    @asynccontextmanager
    async def enter(self, hold_s: float | None = HOLD_S) -> AsyncIterator[None]:
        """Run a model call inside. Raises UnavailableError after `hold_s` of a pause (None: never), or at shutdown."""
        if self.paused:
            await self._hold(hold_s)
        try:
            with self._counted(self._in_flight):
                yield
        finally:
            if not self._in_flight and self.paused:
                self._settled.set()
                self.on_idle()

    def hold(self, pause: Pause) -> None:
        """New calls wait from now on, for the end of this pause."""
        if not self.paused:
            self._closed_s = self._clock()
        self.pause = pause
        self._open.clear()
        self._settled.set()

    def release(self) -> None:
        """Let everything go on. Safe to call when not paused."""
        if self.paused:
            self._paused_s += self._clock() - self._closed_s
        self.pause = None
        self._open.set()
        self._settled.set()

    def close(self) -> None:
        """At shutdown: calls that wait are refused instead of held."""
        self._closed = True
        self._open.set()

    async def idle(self, pause_id: str) -> None:
        """Return when nothing is in flight any more, or when another pause or none has taken the place of this one."""
        while self._in_flight and self.paused_for(pause_id):
            self._settled.clear()
            await self._settled.wait()

    async def _hold(self, hold_s: float | None) -> None:
        self.held_total += 1
        with self._counted(self._held) as since_s:
            try:
                async with asyncio.timeout(hold_s):
                    while self.paused and not self._closed:
                        await self._open.wait()
            except TimeoutError:
                raise UnavailableError(
                    f"the gateway has been paused for {hold_s:.0f} s (weights are being changed); try again"
                ) from None
            finally:
                self._held_s += self._clock() - since_s
        if self._closed:
            raise UnavailableError("the gateway is shutting down; try again when it is back")

    @contextmanager
    def _counted(self, calls: dict[object, float]) -> Iterator[float]:
        token = object()
        calls[token] = since_s = self._clock()
        try:
            yield since_s
        finally:
            del calls[token]
