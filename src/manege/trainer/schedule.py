"""Which groups are under way, and which of them the next step trains on; pure.

Whoever drives it (the loop, or a simulation on a virtual clock) asks for `wanted` groups, says what it sees of them and
gets the groups of a step by `draw`. `sync` and `async` differ in two numbers: how many groups are under way, and how
old a group may be. A group that is trained under version v has staleness v - (version of its oldest token).

A step publishes a version, and so makes whatever it leaves older. It is drawn only if all of that can still be trained
in time, `groups` at a step and the most urgent first. By hand, 2 groups per step and max_staleness 1: of four groups
that began under version 5 the first step trains two, and the other two have to go into the next one. At version 6
nothing but these two can be drawn, however many newer ones have ended: while one of them is unfinished it is waited
for, or cut off (`late`). That there is always such a way out is what `wanted` takes care of: it never asks for more
than the steps until then can train.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from manege.train_config import TrainConfig

__all__ = ["Drawn", "Schedule"]

_MAX_REPLACED = 2
"""Per group of a step: where most groups are constant, a step ends all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The groups of one step, by index in ascending order."""

    groups: Sequence[int]
    """To train on; always as many as a step has."""
    replaced: Sequence[int]
    """Others that ended since the last step and taught nothing."""


@dataclass(slots=True, kw_only=True)
class _Group:
    index: int
    oldest: int | None
    """Version of its oldest token; None: as far as is known it begins under the present one."""
    ended: bool = False


class Schedule:
    """Groups are known by their index in the sequence of tasks."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._max_staleness = config.max_staleness if config.schedule == "async" else math.inf
        self._groups: dict[int, _Group] = {}
        """Under way, those that ended and teach nothing apart."""
        self._others: list[int] = []
        """These."""
        self._num_rollouts = self._num_cut = 0

    @property
    def under_way(self) -> Mapping[int, int | None]:
        """Groups that no step has drawn, with the version of their oldest token as far as it is known."""
        return {index: group.oldest for index, group in self._groups.items()} | dict.fromkeys(self._others)

    def wanted(self, num_left: int, *, begins: int, trains: int) -> int:
        """Groups to ask for now; `num_left`: those that the rest of the run trains. They may begin under version
        `begins`, and the next step that is drawn trains `trains`: the same one, or the next while a step is made."""
        num = len(self._groups)
        room = min(self._config.active_groups, num_left) - num - self._num_filling
        in_time = (begins + self._max_staleness - trains + 1) * self._config.groups - num
        return max(0, int(min(room, in_time)))

    def ask(self, index: int, oldest: int | None = None) -> None:
        """A group is asked for; `oldest`: of an earlier life of the run."""
        self._groups[index] = _Group(index=index, oldest=oldest)
        self._num_rollouts += self._config.group_size

    def began(self, indices: Iterable[int], version: int) -> None:
        """They may have tokens of this version, which is about to end."""
        for index in indices:
            group = self._groups.get(index)
            if group is not None and group.oldest is None:
                group.oldest = version

    def end(self, index: int, oldest: int | None, *, teaches: bool = True) -> None:
        """A group is complete. `oldest`: of its tokens; None: it has none. One that teaches nothing is replaced by
        another, at most 2 `groups` per step."""
        if teaches:
            self._groups[index] = _Group(index=index, oldest=oldest, ended=True)
        else:
            del self._groups[index]
            self._others.append(index)

    def drop(self, index: int) -> None:
        """No step will train it."""
        del self._groups[index]

    def too_old(self, version: int) -> Sequence[int]:
        """Ended groups that no step may train any more: versions were counted while nothing was trained (a resume)."""
        return [
            group.index for group in self._groups.values() if group.ended and self._deadline(group, version) < version
        ]

    def draw(self, version: int) -> Drawn | None:
        """The groups of the step that trains this version, which are then no longer under way; None: not yet."""
        batch = self._batch(version)
        if batch is None or self._blocking(batch, version):
            return None
        others, num_filling = sorted(self._others), self._config.groups - len(batch)
        num_replaced = len(others) - num_filling
        for index in batch:
            del self._groups[index]
        self._others = []
        return Drawn(groups=sorted([*batch, *others[num_replaced:]]), replaced=others[:num_replaced])

    def late(self, version: int, num_unfinished: Callable[[int], int]) -> int | None:
        """With `drop`: the group whose unfinished rollouts (so many of a group) shall be cut off, so that a step can be
        drawn. The caller cancels them, and says how the group `end`s."""
        if self._config.staleness_policy == "wait" or (batch := self._batch(version)) is None:
            return None
        if not (blocking := self._blocking(batch, version)):
            return None
        num_cut = self._num_cut + num_unfinished(blocking[0])
        if num_cut > self._config.max_dropped_fraction * self._num_rollouts:
            return None
        self._num_cut = num_cut
        return blocking[0]

    @property
    def _num_filling(self) -> int:
        """Groups that teach nothing and that no other will stand for."""
        return max(0, len(self._others) - _MAX_REPLACED * self._config.groups)

    def _batch(self, version: int) -> Sequence[int] | None:
        """Of those worth it; the rest of a step are groups that nothing stands for."""
        ended = [group.index for group in self._by_urgency(version) if group.ended]
        batch = ended[: self._config.groups]
        return batch if len(batch) + self._num_filling >= self._config.groups else None

    def _blocking(self, batch: Sequence[int], version: int) -> Sequence[int]:
        """Unfinished groups that would be too old if the batch were trained without them, the most urgent first."""
        drawn = set(batch)
        left = [group for group in self._by_urgency(version) if group.index not in drawn]
        num_urgent = 0
        for position, group in enumerate(left):
            # The first version under which its turn comes.
            if version + 1 + position // self._config.groups > self._deadline(group, version):
                num_urgent = position + 1
        return [group.index for group in left[:num_urgent] if not group.ended]

    def _by_urgency(self, version: int) -> Sequence[_Group]:
        return sorted(self._groups.values(), key=lambda group: (self._deadline(group, version), group.index))

    def _deadline(self, group: _Group, version: int) -> float:
        """The last version under which it may be trained. A group without a token never grows old."""
        if group.oldest is None and group.ended:
            return math.inf
        return (version if group.oldest is None else group.oldest) + self._max_staleness
