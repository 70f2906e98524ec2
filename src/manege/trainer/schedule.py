"""When rollouts are asked for, and which groups an update trains on.

The loop asks a schedule for the groups of the next step and never waits for anything else. `sync`: make B groups, wait
for all of them. A schedule may replace groups that teach nothing by new ones.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from manege.trainer.collect import Group

__all__ = ["Drawn", "Schedule", "SyncSchedule"]

_MAX_REPLACED = 2
"""Per group of a step: where most groups are constant, a step ends all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The groups of one step."""

    groups: Sequence[Group]
    """To train on, by id; always as many as a step has."""
    replaced: Sequence[Group]
    """Others that ended for this step and taught nothing, by id."""


class Schedule(Protocol):
    """Decides what is in flight."""

    async def next_batch(self) -> Drawn:
        """What the next update trains on."""
        ...


class SyncSchedule:
    """Inference and training take turns; every token is sampled by the newest weights."""

    def __init__(
        self,
        start_group: Callable[[], Awaitable[None]],
        next_group: Callable[[], Awaitable[Group]],
        num_groups: int,
        *,
        keep: Callable[[Group], bool] = lambda _: True,
    ) -> None:
        """`start_group` asks for the next task's rollouts, `next_group` waits for a complete group. `keep` says whether
        one is worth training on: others are replaced, at most 2 `num_groups` per step, and then taken as they are."""
        self._start_group, self._next_group = start_group, next_group
        self._num_groups, self._keep = num_groups, keep

    async def next_batch(self) -> Drawn:
        """See Schedule. Which groups these are, and their order, does not depend on the order of completion."""
        worth: list[Group] = []
        others: list[Group] = []
        num_replaceable = _MAX_REPLACED * self._num_groups
        for _ in range(self._num_groups):
            await self._start_group()
        while len(worth) < self._num_groups and len(worth) + len(others) < self._num_groups + num_replaceable:
            group = await self._next_group()
            if self._keep(group):
                worth.append(group)
                continue
            others.append(group)
            if len(others) <= num_replaceable:
                await self._start_group()
        others.sort(key=_by_id)
        num_replaced = len(others) - (self._num_groups - len(worth))
        return Drawn(groups=sorted(worth + others[num_replaced:], key=_by_id), replaced=others[:num_replaced])


def _by_id(group: Group) -> str:
    return group.id
