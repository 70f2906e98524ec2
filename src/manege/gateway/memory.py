"""What is remembered of the attempts that are active, so that the next call can continue an earlier one.

A cache: rebuilt from the store when an attempt is unknown, after a restart or because it was dropped, at the end of its
rollout or as the least recently used. Where other gateways write to the same database, `of` first learns of the calls
that they answered meanwhile; who finds what it looks for among those that are known `here` can do without that question
to the database. Concurrency: one event loop.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from manege.store.sql import SqlStore
from manege.types import Call, CallId, Delivered, RolloutId

__all__ = ["AttemptMemory"]

MAX_ROLLOUTS = 4096
"""Whose calls are remembered, at 4 bytes per token: more than run at once on one process (beyond, each call reads what
its rollout has served so far)."""


class Remembered(Protocol):
    """The calls of one attempt (`Conversation`, `PrefixIndex`)."""

    def restore(self, calls: Sequence[Call]) -> None:
        """Remember stored calls, in their order; those that are known already stay as they are."""
        ...

    def forget(self, call: Call) -> None:
        """Take back an answer that the agent did not get: nothing continues it."""
        ...


T = TypeVar("T", bound=Remembered)


@dataclass(slots=True)
class _Attempt(Generic[T]):
    number: int
    remembered: T
    seen: set[CallId]
    """Stored calls that were looked at, whatever became of them; kept up only where others write."""


class AttemptMemory(Generic[T]):
    """The last attempt of each rollout."""

    def __init__(self, store: SqlStore, make: Callable[[], T]) -> None:
        self._store = store
        self._make = make
        self._attempts: OrderedDict[RolloutId, _Attempt[T]] = OrderedDict()

    async def of(self, rollout_id: RolloutId, attempt: int) -> T:
        """What is known of an attempt, by whatever gateway."""
        remembered = await self.here(rollout_id, attempt)
        await self.catch_up(rollout_id, attempt)
        return remembered

    async def here(self, rollout_id: RolloutId, attempt: int) -> T:
        """What this process knows of an attempt, read from the store if it is not in memory."""
        known = self._get(rollout_id, attempt)
        if known is None:
            rebuilt = _Attempt(attempt, self._make(), set())
            await self._read(rebuilt, rollout_id)
            # Whoever was first while we read has newer calls already.
            if (known := self._get(rollout_id, attempt)) is None:
                known = self._attempts[rollout_id] = rebuilt
            if len(self._attempts) > MAX_ROLLOUTS:
                self._attempts.popitem(last=False)
        if rollout_id in self._attempts:
            self._attempts.move_to_end(rollout_id)
        return known.remembered

    async def catch_up(self, rollout_id: RolloutId, attempt: int) -> bool:
        """Learn of what other gateways answered; whether there was anything."""
        if not self._store.is_shared or (known := self._get(rollout_id, attempt)) is None:
            return False
        if known.seen.issuperset(await self._store.attempt_call_ids(rollout_id, attempt)):
            return False
        await self._read(known, rollout_id)
        return True

    def note(self, call: Call) -> None:
        """A call was answered and stored here."""
        if self._store.is_shared and (known := self._get(call.rollout_id, call.attempt)):
            known.seen.add(call.id)

    def forget_call(self, call: Call) -> None:
        """Take back an answer that the agent did not get."""
        if known := self._get(call.rollout_id, call.attempt):
            known.remembered.forget(call)

    def forget(self, rollout_id: RolloutId) -> None:
        """It has ended, or begun anew."""
        self._attempts.pop(rollout_id, None)

    async def _read(self, attempt: _Attempt[T], rollout_id: RolloutId) -> None:
        calls = (await self._store.calls([rollout_id])).get(rollout_id, ())
        calls = [call for call in calls if call.attempt == attempt.number and call.id not in attempt.seen]
        attempt.seen.update(call.id for call in calls)
        attempt.remembered.restore(
            [call for call in calls if "messages" in call.request and call.delivered is not Delivered.NO]
        )

    def _get(self, rollout_id: RolloutId, attempt: int) -> _Attempt[T] | None:
        known = self._attempts.get(rollout_id)
        return known if known is not None and known.number == attempt else None
