"""Wakes long polls: every write that may interest a waiter calls `changed()`.

A waiter takes the present tick *before* it reads the store and waits for a later one, so that a write between its read
and its wait is never slept through.
"""

import asyncio

__all__ = ["Feed"]


class Feed:
    """Ticks of one event loop."""

    def __init__(self) -> None:
        self._tick = asyncio.Event()
        self.closed = False
        """Set at shutdown: long polls answer with what they have."""

    @property
    def tick(self) -> asyncio.Event:
        """Set at the next change."""
        return self._tick

    def changed(self) -> None:
        """Wake all who wait for the present tick."""
        self._tick.set()
        self._tick = asyncio.Event()

    def close(self) -> None:
        """End every wait, now and later."""
        self.closed = True
        self._tick.set()
