"""When rollouts are asked for, and which groups an update trains on.

The loop asks a schedule for the groups of the next step and never waits for anything else. `sync`: make B groups, wait
for all of them.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from manege.trainer.collect import Group, GroupFeed

__all__ = ["Schedule", "SyncSchedule"]


class Schedule(Protocol):
    """Decides what is in flight."""

    async def next_batch(self) -> Sequence[Group]:
        """The groups that the next update trains on."""
        ...


class SyncSchedule:
    """Inference and training take turns; every token is sampled by the newest weights."""

    def __init__(self, feed: GroupFeed, start_group: Callable[[], Awaitable[None]], num_groups: int) -> None:
        self._feed, self._start_group, self._num_groups = feed, start_group, num_groups

    async def next_batch(self) -> Sequence[Group]:
        """See Schedule."""
        for _ in range(self._num_groups):
            await self._start_group()
        return [await self._feed.next_group() for _ in range(self._num_groups)]
