"""How the engines that serve are, for whoever sets a pace by them: what they can do, their queues, their idle time.

An engine is asked at most once in EVERY_S, however many want to know, and never twice at once; one that does not answer
within ANSWER_S is left out until it does.

Concurrency: one event loop; who comes while engines are asked waits for the same answers.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import fmean

from manege.engine.base import Engine, EngineInfo
from manege.errors import ManegeError
from manege.gateway.members import Member

__all__ = ["EngineState", "EngineStates"]

EVERY_S = 1.0
"""From the answers to the next question."""
ANSWER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Of all engines that serve, together."""

    inflight: Sequence[str]
    """Values of train.inflight that all of them can."""
    weights: Sequence[str]
    """Kinds of weights that all of them load."""
    running: int
    """Sequences that they decode."""
    waiting: int
    """Sequences in their own queues."""
    cache_usage: float
    """Share of the cache's room that sequences hold, 0 to 1, where it is largest."""
    idle_s: float
    """Seconds since the start without a call of this gateway while it was not paused; mean."""


class EngineStates:
    """Remembers the last answers."""

    def __init__(self) -> None:
        self._asking: dict[Member, asyncio.Task[EngineInfo | None]] = {}
        self._infos: Sequence[EngineInfo] = ()
        self._next_s = 0.0
        self._lock = asyncio.Lock()

    async def of(self, members: Sequence[Member]) -> EngineState:
        """What is known of these, now."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            if loop.time() >= self._next_s:
                self._infos = await self._ask(members)
                self._next_s = loop.time() + EVERY_S
            infos = self._infos
        can = [member.capabilities for member in members]
        return EngineState(
            inflight=_common([each.inflight for each in can]),
            weights=_common([each.weights for each in can]),
            running=sum(info.num_running for info in infos),
            waiting=sum(info.num_waiting for info in infos),
            cache_usage=max((info.cache_usage for info in infos), default=0.0),
            idle_s=fmean([member.idle_s for member in members] or [0.0]),
        )

    def close(self) -> None:
        """Ask no more."""
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, members: Sequence[Member]) -> list[EngineInfo]:
        """Who is slow is not asked again, and not cut off either: an engine may be getting its weights back."""
        old = self._asking
        self._asking = {}
        for member in members:
            if (task := old.pop(member, None)) is not None and not task.done():
                self._asking[member] = task
            elif member.tokens is not None and member.is_healthy:
                self._asking[member] = asyncio.create_task(_info(member.tokens), name="engine-state")
        for task in old.values():
            task.cancel()
        if not self._asking:
            return []
        done, _ = await asyncio.wait(self._asking.values(), timeout=ANSWER_S)
        return [info for task in done if (info := task.result()) is not None]


async def _info(engine: Engine) -> EngineInfo | None:
    try:
        return await engine.info()
    except ManegeError:
        return None


def _common(sets: Sequence[frozenset[str]]) -> list[str]:
    return sorted(reduce(frozenset.intersection, sets)) if sets else []
