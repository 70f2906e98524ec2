"""Long polls: after every change of the database `changed()` is called (`following.py`), and all who wait look again.

A waiter takes the present tick *before* it reads the store and waits for a later one, so that a write between its read
and its wait is never slept through. What happens without a write (a lease that runs out) is seen at the next recheck.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request

from manege.http import ClientGone, Connection

__all__ = ["Feed"]

RECHECK_S = 1.0
"""How late it may be noticed that a lease ran out, or that a failed rollout may be tried again."""

T = TypeVar("T")


class Feed:
    """Ticks of one event loop."""

    def __init__(self) -> None:
        self._tick = asyncio.Event()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the gateway is shutting down."""
        return self._closed

    def changed(self) -> None:
        """Wake all who wait."""
        self._tick.set()
        if not self._closed:
            self._tick = asyncio.Event()

    def close(self) -> None:
        """At shutdown: waiters answer with what they have, now and later."""
        self._closed = True
        self._tick.set()

    async def poll(self, request: Request, wait_s: float, read: Callable[[], Awaitable[T]], empty: T) -> T:
        """What `read` finds as soon as it is not `empty`, or `empty` after `wait_s`, or when the client is gone: then
        nothing is read, since nobody would get it. The request's body must have been read."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        async with Connection(request.receive) as connection:
            while not connection.gone:
                tick = self._tick
                found = await read()
                left_s = deadline_s - loop.time()
                if found != empty or left_s <= 0 or self._closed:
                    return found
                with suppress(TimeoutError, ClientGone):
                    async with asyncio.timeout(min(left_s, RECHECK_S)):
                        await connection.run(tick.wait())
        return empty
