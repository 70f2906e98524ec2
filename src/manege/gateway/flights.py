"""Answers under way, apart from the connections that wait for them.

A client that goes away does not end its answer at once: many harnesses time out and send the same request again while
the first copy still runs, and the second copy then *attaches* to it. After GRACE_S without a reader the answer is
aborted; what was sampled is recorded as not delivered. Two clients that are both there never share an answer: equal
prompts in parallel are samples of their own.

Concurrency: one event loop. `emit` never waits; a reader that is slow finds the deltas in order.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from manege.errors import UnavailableError
from manege.protocols.base import ModelReply, ReplyDelta, ReplyHead
from manege.types import Call

__all__ = ["Flight", "Flights"]

GRACE_S = 1.0
"""How long an answer outlives its reader: longer than a client needs to connect anew, well under the 2 s in which an
engine must see that nobody waits."""


class Flight:
    """One answer under way."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        """Of the attempt and the normalised request."""
        self.head: ReplyHead | None = None
        """Known once the request is admitted."""
        self.calls: list[Call] = []
        """Stored calls: one per choice when it has ended."""
        self.deltas: list[tuple[int, ReplyDelta]] = []
        self.has_reader = True
        self.task: asyncio.Task[ModelReply | bytes]
        self._news = asyncio.Event()

    @property
    def has_failed(self) -> bool:
        """Whether it ended in an error."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def begin(self, head: ReplyHead) -> None:
        """The request is admitted."""
        self.head = head
        self.tell()

    def emit(self, choice: int, delta: ReplyDelta) -> None:
        """More of the answer number `choice`."""
        self.deltas.append((choice, delta))
        self.tell()

    async def admitted(self) -> None:
        """Return when the request is admitted, or has failed."""
        while self.head is None and not self.task.done():
            await self._news.wait()

    async def started(self, timeout_s: float) -> bool:
        """Whether there is something to send: True at the first delta or at the end, False after `timeout_s`."""
        async with aclosing(self.follow(timeout_s)) as items:
            async for item in items:
                return item is not None
        return True

    async def follow(self, silence_s: float) -> AsyncGenerator[tuple[int, ReplyDelta] | None, None]:
        """All deltas from the first on, then the end; None whenever nothing came for `silence_s`."""
        position = 0
        while True:
            while position < len(self.deltas):
                yield self.deltas[position]
                position += 1
            if self.task.done():
                return
            try:
                async with asyncio.timeout(silence_s):
                    await self._news.wait()
            except TimeoutError:
                yield None

    def tell(self) -> None:
        """Wake who waits."""
        self._news.set()
        self._news = asyncio.Event()


class Flights:
    """All answers under way."""

    def __init__(self, now_s: float) -> None:
        self.recorded_since_s = now_s
        """Answers that failed before may be in no log: we did not run, or the store was away."""
        self._flights: dict[bytes, list[Flight]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def join(self, key: bytes, work: Callable[[Flight], Awaitable[ModelReply | bytes]]) -> Flight:
        """The answer to the same request that lost its client, or a new one."""
        for flight in self._flights.get(key, ()):
            if not flight.has_reader and not flight.has_failed:
                flight.has_reader = True
                return flight
        flight = Flight(key)

        async def run() -> ModelReply | bytes:
            try:
                return await work(flight)
            except asyncio.CancelledError:
                raise UnavailableError("the answer was aborted; send the request again") from None

        flight.task = asyncio.create_task(run(), name="model-call")
        flight.task.add_done_callback(lambda task: _ended(flight, task))
        self._flights.setdefault(key, []).append(flight)
        return flight

    def leave(self, flight: Flight) -> None:
        """The reader got everything."""
        flights = self._flights.get(flight.key, [])
        if flight in flights:
            flights.remove(flight)
        if not flights:
            self._flights.pop(flight.key, None)

    def abandon(self, flight: Flight, lost: Callable[[Flight], Awaitable[None]]) -> None:
        """The reader went away; `lost` is called if nobody took over in time, when the answer has ended."""
        flight.has_reader = False

        async def wait() -> None:
            await asyncio.sleep(GRACE_S)
            if flight.has_reader:
                return
            self.leave(flight)
            flight.task.cancel()
            await asyncio.wait({flight.task})
            await lost(flight)

        task = asyncio.create_task(wait(), name="abandoned-call")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """End all; what was sampled so far is recorded."""
        tasks = {flight.task for flights in self._flights.values() for flight in flights}
        for task in tasks:
            task.cancel()
        if pending := tasks | self._leaving:
            await asyncio.wait(pending)


def _ended(flight: Flight, task: asyncio.Task[ModelReply | bytes]) -> None:
    flight.tell()
    if not task.cancelled():
        # Read, so that asyncio does not complain where the client has gone and nobody else asks.
        task.exception()
