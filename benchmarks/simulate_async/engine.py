"""An engine with continuous batching: calls share it, and each gets one token per decode step.

A step of n sequences takes base_s + slope_s * n. Prompt tokens that are not in the cache are read between two steps,
which all sequences wait for. Beyond `max_batch` sequences, calls wait in the order in which they came.

Time passes in jumps. `_progress` counts decode steps as a real number that grows at 1 / (seconds per step); a call is
done when it reaches the mark that it was given at its admission, so an event costs O(log n) however many calls run.
"""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass
from functools import partial

from benchmarks.simulate_async.clock import Clock, Signal

__all__ = ["Call", "Engine", "Speed"]

_ROUNDING = 1e-9
"""Of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of one engine."""

    base_s: float
    """Of a decode step, whatever the number of sequences."""
    slope_s: float = 0.0
    """Of a decode step, per sequence."""
    prefill_s: float = 0.0
    """Per prompt token that is not in the cache."""
    max_batch: int = 256
    """Sequences decoded together."""

    def step_s(self, num_sequences: int) -> float:
        """Seconds of a decode step."""
        return self.base_s + self.slope_s * num_sequences


class Call:
    """An answer that is to be sampled."""

    __slots__ = ("cached_tokens", "done", "is_running", "mark", "num_tokens", "prompt_tokens", "version")

    def __init__(self, clock: Clock, *, prompt_tokens: int, cached_tokens: int, num_tokens: int) -> None:
        self.prompt_tokens, self.cached_tokens, self.num_tokens = prompt_tokens, cached_tokens, num_tokens
        self.done = Signal(clock)
        self.version: int | None = None
        """Of its first token; None: it has none."""
        self.is_running, self.mark = False, 0.0


class Engine:
    """Serves calls; stands still while it is paused."""

    def __init__(self, clock: Clock, speed: Speed) -> None:
        self._clock, self._speed = clock, speed
        self.version = 0
        self.idle_s = 0.0
        """Without a call, while not paused."""
        self._paused, self._since = False, 0.0
        self._progress = self._stall_s = 0.0
        self._waiting: deque[Call] = deque()
        self._marks: list[tuple[float, int, Call]] = []
        self._num_running = 0
        self._numbers = itertools.count()
        self._plan_number = 0

    @property
    def num_calls(self) -> int:
        """Running or waiting."""
        return self._num_running + len(self._waiting)

    def start(self, call: Call) -> None:
        """`call.done` will be given."""
        self._advance()
        self._waiting.append(call)
        self._admit()

    def remove(self, call: Call) -> None:
        """Whoever asked is gone."""
        self._advance()
        if call.is_running:
            call.is_running = False
            self._num_running -= 1
        elif call in self._waiting:
            self._waiting.remove(call)
        self._admit()

    def pause(self) -> None:
        """Calls keep what they have."""
        self._advance()
        self._paused = True
        self._plan()

    def publish(self, version: int, *, keep: bool) -> None:
        """New weights: what was computed is lost, unless running calls `keep` it."""
        self._advance()
        self.version = version
        for call in self._waiting:
            call.cached_tokens = 0
        if not keep:
            running = [(mark, call) for mark, _, call in self._marks if call.is_running]
            num_answered = sum(call.num_tokens - (mark - self._progress) for mark, call in running)
            self._stall_s = self._speed.prefill_s * (sum(call.prompt_tokens for _, call in running) + num_answered)

    def resume(self) -> None:
        """Go on."""
        self._advance()
        self._paused = False
        self._admit()

    def settle_accounts(self) -> None:
        """Bring `idle_s` up to now."""
        self._advance()

    def _advance(self) -> None:
        elapsed, self._since = self._clock.now - self._since, self._clock.now
        if self._paused:
            return
        if not self._num_running:
            self.idle_s += elapsed
            return
        stalled = min(elapsed, self._stall_s)
        self._stall_s -= stalled
        self._progress += (elapsed - stalled) / self._speed.step_s(self._num_running)

    def _admit(self) -> None:
        while self._waiting and not self._paused and self._num_running < self._speed.max_batch:
            call = self._waiting.popleft()
            call.version, call.is_running, call.mark = self.version, True, self._progress + call.num_tokens
            self._num_running += 1
            self._stall_s += self._speed.prefill_s * (call.prompt_tokens - call.cached_tokens)
            heapq.heappush(self._marks, (call.mark, next(self._numbers), call))
        self._plan()

    def _plan(self) -> None:
        """The next end of a call; an earlier plan no longer counts."""
        self._plan_number += 1
        while self._marks and not self._marks[0][2].is_running:
            heapq.heappop(self._marks)
        if self._paused:
            return
        if not self._marks:
            self._stall_s = 0.0
            return
        mark = self._marks[0][0]
        delay_s = self._stall_s + max(0.0, mark - self._progress) * self._speed.step_s(self._num_running)
        self._clock.after(delay_s, partial(self._finish, self._plan_number, mark))

    def _finish(self, plan_number: int, mark: float) -> None:
        if plan_number != self._plan_number:
            return
        self._advance()
        # Whatever rounding made of it.
        self._progress = max(self._progress, mark)
        while self._marks and self._marks[0][0] <= self._progress + _ROUNDING:
            _, _, call = heapq.heappop(self._marks)
            if call.is_running:
                call.is_running = False
                self._num_running -= 1
                call.done.give()
        self._admit()
