"""A virtual clock, and processes that wait on it: generators that yield seconds to wait, or a signal to wait for.

Events of the same moment happen in the order in which they were planned, so that equal inputs give equal runs. Nothing
here knows what is simulated.
"""

import heapq
import itertools
from collections.abc import Callable, Generator

__all__ = ["Clock", "Process", "Signal", "Steps"]


class Signal:
    """Wakes all that wait for it, as often as it is given."""

    def __init__(self, clock: "Clock") -> None:
        self._clock = clock
        self._waiting: list[Callable[[], None]] = []

    def wait(self, action: Callable[[], None]) -> None:
        """Once."""
        self._waiting.append(action)

    def give(self) -> None:
        """In this moment, but after whoever gives it is done."""
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self._clock.after(0, action)


Steps = Generator[float | Signal, None, None]


class Process:
    """A generator at work."""

    def __init__(self, clock: "Clock", steps: Steps) -> None:
        self._clock, self._steps = clock, steps
        self.is_over = False
        clock.after(0, self._go)

    def end(self) -> None:
        """Now, wherever it waits; its `finally` blocks run."""
        self.is_over = True
        self._steps.close()

    def _go(self) -> None:
        if self.is_over:
            return
        try:
            awaited = next(self._steps)
        except StopIteration:
            self.is_over = True
            return
        if isinstance(awaited, Signal):
            awaited.wait(self._go)
        else:
            self._clock.after(awaited, self._go)


class Clock:
    """Seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Plan an event."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), action))

    def run(self, process: Process) -> None:
        """Until it is over. RuntimeError where it waits for something that nothing will bring."""
        while not process.is_over:
            if not self._events:
                raise RuntimeError("the simulation stands still: a process waits for what nothing will bring")
            self.now, _, action = heapq.heappop(self._events)
            action()
