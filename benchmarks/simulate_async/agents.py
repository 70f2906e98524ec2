"""The controller, the gateway and the engines: rollouts wait for a slot, then call, use tools and are scored.

While the gateway holds, new calls wait for `resume`. A rollout's calls go to one engine, which has its cache, unless
that one is overloaded (gateway/members.py; of many engines some are looked at instead of all).
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.simulate_async.clock import Clock, Process, Signal, Steps
from benchmarks.simulate_async.engine import Call, Engine, Speed
from benchmarks.simulate_async.workload import Plan
from manege.gateway.members import MAX_EXTRA_CALLS

__all__ = ["Agents", "Rollout"]

_NUM_LOOKS = 8
"""Engines among which the idlest is sought."""


@dataclass(slots=True, kw_only=True, eq=False)
class Rollout:
    """One of a group, or of an evaluation (group None)."""

    group: int | None
    plan: Plan
    process: Process | None = None
    """None: it waits for a slot."""
    oldest: int | None = None
    """Version of its first token."""
    is_cut: bool = False
    has_ended: bool = False


class Agents:
    """All rollouts that were asked for, and what serves them."""

    def __init__(
        self,
        clock: Clock,
        *,
        num_engines: int,
        speed: Speed,
        slots: int,
        shared_tokens: int,
        seed: int,
        ended: Callable[[Rollout], None],
    ) -> None:
        """`shared_tokens`: that all prompts begin with; `ended`: called for each rollout, cut off or not."""
        self._clock, self._slots, self._shared_tokens, self._ended = clock, slots, shared_tokens, ended
        self.engines: Sequence[Engine] = [Engine(clock, speed) for _ in range(num_engines)]
        self._has_shared: dict[Engine, int] = {}
        """The version whose cache has the shared tokens."""
        self._rng = random.Random(f"{seed}:routing")
        self._queue: deque[Rollout] = deque()
        self._num_started = 0
        self._holding = False
        self._resumed, self._settled = Signal(clock), Signal(clock)
        self._num_in_flight = 0

    def ask(self, rollout: Rollout) -> None:
        """It begins when a slot is free."""
        self._queue.append(rollout)
        self._fill_slots()

    def cut(self, rollout: Rollout) -> None:
        """Cancel it."""
        rollout.is_cut = True
        if rollout.process is None:
            self._queue.remove(rollout)
        else:
            rollout.process.end()
            self._num_started -= 1
        self._end(rollout)

    def settle(self, drain_s: float) -> Steps:
        """Hold new calls, let those in flight end for at most `drain_s`, then pause the engines."""
        self._holding = True
        deadline = self._clock.now + drain_s
        self._clock.after(drain_s, self._settled.give)
        while self._num_in_flight and self._clock.now < deadline:
            yield self._settled
        for engine in self.engines:
            engine.pause()

    def resume(self, version: int, *, keep: bool) -> None:
        """With new weights."""
        self._holding = False
        for engine in self.engines:
            engine.publish(version, keep=keep)
            engine.resume()
        self._resumed.give()

    def idle_s(self) -> float:
        """Mean over the engines."""
        for engine in self.engines:
            engine.settle_accounts()
        return sum(engine.idle_s for engine in self.engines) / len(self.engines)

    def _fill_slots(self) -> None:
        while self._queue and self._num_started < self._slots:
            rollout = self._queue.popleft()
            self._num_started += 1
            rollout.process = Process(self._clock, self._work(rollout))

    def _end(self, rollout: Rollout) -> None:
        rollout.has_ended = True
        self._fill_slots()
        self._ended(rollout)

    def _work(self, rollout: Rollout) -> Steps:
        home, engine, version, num_cached = self._rng.choice(self.engines), None, None, 0
        yield rollout.plan.start_s
        for turn in rollout.plan.turns:
            while self._holding:
                yield self._resumed
            before, engine = engine, self._choose(home)
            if engine is not before or engine.version != version:
                num_cached = self._shared(engine)
            call = Call(
                self._clock,
                prompt_tokens=turn.prompt_tokens,
                cached_tokens=min(num_cached, turn.prompt_tokens - 1),
                num_tokens=turn.answer_tokens,
            )
            yield from self._call(engine, call)
            version, num_cached = engine.version, turn.prompt_tokens + turn.answer_tokens
            if rollout.oldest is None:
                rollout.oldest = call.version
            yield turn.tool_s
        yield rollout.plan.score_s
        self._num_started -= 1
        self._end(rollout)

    def _call(self, engine: Engine, call: Call) -> Steps:
        self._num_in_flight += 1
        try:
            engine.start(call)
            yield call.done
        except GeneratorExit:
            engine.remove(call)
            raise
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._settled.give()

    def _choose(self, home: Engine) -> Engine:
        if home.num_calls <= MAX_EXTRA_CALLS:
            return home
        first = self._rng.randrange(len(self.engines))
        looked_at = [self.engines[(first + number) % len(self.engines)] for number in range(_NUM_LOOKS)]
        idlest = min(looked_at, key=lambda engine: engine.num_calls)
        return idlest if home.num_calls > 2 * idlest.num_calls + MAX_EXTRA_CALLS else home

    def _shared(self, engine: Engine) -> int:
        """Tokens that an engine has of a prompt that is new to it."""
        is_first = self._has_shared.get(engine) != engine.version
        self._has_shared[engine] = engine.version
        return 0 if is_first else self._shared_tokens
