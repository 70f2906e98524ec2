"""What is remembered of the attempts that are active, so that the next call can continue an earlier one.

A cache: rebuilt from the store when an attempt is unknown, after a restart or because it was dropped, at the end of its
rollout or as the least recently used. Concurrency: one event loop.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from manege.store.sql import SqlStore
from manege.types import Call, Delivered, RolloutId

__all__ = ["AttemptMemory"]

MAX_ROLLOUTS = 1024
"""Whose calls are remembered, at 4 bytes per token: more than run at once on one gateway."""


class Remembered(Protocol):
    """The calls of one attempt (`Conversation`, `PrefixIndex`)."""

    def restore(self, calls: Sequence[Call]) -> None:
        """Remember stored calls, in their order."""
        ...

    def forget(self, call: Call) -> None:
        """Take back an answer that the agent did not get: nothing continues it."""
        ...


T = TypeVar("T", bound=Remembered)


class AttemptMemory(Generic[T]):
    """The last attempt of each rollout."""

    def __init__(self, store: SqlStore, make: Callable[[], T]) -> None:
        self._store = store
        self._make = make
        self._attempts: OrderedDict[RolloutId, tuple[int, T]] = OrderedDict()

    async def of(self, rollout_id: RolloutId, attempt: int) -> T:
        """What is known of an attempt, read from the store if it is not in memory."""
        if self._get(rollout_id, attempt) is None:
            calls = (await self._store.calls([rollout_id])).get(rollout_id, ())
            rebuilt = self._make()
            rebuilt.restore(
                [
                    call
                    for call in calls
                    if call.attempt == attempt and "messages" in call.request and call.delivered is not Delivered.NO
                ]
            )
            # Whoever was first while we read has newer calls already.
            if self._get(rollout_id, attempt) is None:
                self._attempts[rollout_id] = attempt, rebuilt
            if len(self._attempts) > MAX_ROLLOUTS:
                self._attempts.popitem(last=False)
        self._attempts.move_to_end(rollout_id)
        return self._attempts[rollout_id][1]

    def forget_call(self, call: Call) -> None:
        """Take back an answer that the agent did not get."""
        if (known := self._get(call.rollout_id, call.attempt)) is not None:
            known.forget(call)

    def forget(self, rollout_id: RolloutId) -> None:
        """A rollout has ended."""
        self._attempts.pop(rollout_id, None)

    def _get(self, rollout_id: RolloutId, attempt: int) -> T | None:
        known, remembered = self._attempts.get(rollout_id, (None, None))
        return remembered if known == attempt else None
