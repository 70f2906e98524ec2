"""What the trainer has asked for and what comes of it: training groups for the schedule, evaluations beside them.

The schedule decides (schedule.py, pure); this asks the gateway for what it wants, tells it what ended and how old that
is, cancels what it cuts off, and keeps the groups until a step draws them. Concurrency: one task calls; whoever waits
for a batch or for an evaluation reads the one feed, and what comes for the other one meanwhile is kept for it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manege.client import Client
from manege.config import RunConfig
from manege.trainer.checkpoint import AskedGroup
from manege.trainer.collect import Group, GroupFeed
from manege.trainer.credit import verdict
from manege.trainer.evaluate import PendingEvaluation
from manege.trainer.schedule import Schedule
from manege.trainer.staleness import group_versions
from manege.trainer.tasks import task_order
from manege.types import GroupId, Outcome, PolicyVersion, RolloutId, RolloutState, RunId, Task

__all__ = ["Intake", "StepGroups"]

_MIN_VERDICTS = 2
"""Of a group that was cut off, or nothing can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """The groups of one step."""

    groups: Sequence[Group]
    """To train on."""
    replaced: Sequence[Group]
    """Others that taught nothing."""
    dropped: Sequence[Group]
    """Others that are too old, or that too little is left of."""


class Intake:
    """Of one run."""

    def __init__(
        self,
        feed: GroupFeed,
        client: Client,
        config: RunConfig,
        tasks: Sequence[Task],
        *,
        lineage: str,
        num_taken: int,
        teaches: Callable[[Group], bool],
    ) -> None:
        """`lineage`: what the ids of groups begin with; `num_taken`: groups asked for so far, in earlier lives;
        `teaches`: whether a group is worth training on, or shall be replaced."""
        self._feed, self._client, self._config, self._tasks = feed, client, config, tasks
        self._lineage, self._teaches = lineage, teaches
        self._schedule = Schedule(config.train)
        self.num_taken = num_taken
        self._asked: dict[int, PolicyVersion] = {}
        """Under way: the version in service when it was asked for."""
        self._ended: dict[int, Group] = {}
        self._dropped: list[Group] = []
        self._cut: set[int] = set()
        self._evaluations: list[PendingEvaluation] = []

    @property
    def asked(self) -> Sequence[AskedGroup]:
        """Groups that no step has used yet."""
        oldest = self._schedule.under_way
        return [
            AskedGroup(index=index, policy_version=version, oldest=oldest.get(index))
            for index, version in sorted(self._asked.items())
        ]

    async def ask_again(self, groups: Sequence[AskedGroup]) -> None:
        """What an earlier life of the run asked for."""
        for group in groups:
            await self._ask(group.index, group.policy_version, group.oldest)

    async def ask_wanted(self, version: PolicyVersion, num_left: int, *, trains: int | None = None) -> None:
        """Keep as many groups under way as the schedule wants. `version`: in service; `num_left`: groups that the rest
        of the run trains; `trains`: the version that the next step will train, if it is another one."""
        for _ in range(self._schedule.wanted(num_left, begins=version, trains=trains or version)):
            self.num_taken += 1
            await self._ask(self.num_taken - 1, version, None)

    async def next_batch(self, version: PolicyVersion, num_left: int) -> StepGroups:
        """What the next step trains; waits for it."""
        while True:
            for index in self._schedule.too_old(version):
                self._drop(index)
            if (drawn := self._schedule.draw(version)) is not None:
                break
            await self.ask_wanted(version, num_left)
            await self._cut_late(version)
            await self._take_next()
        dropped, self._dropped = self._dropped, []
        return StepGroups(
            groups=[self._pop(index) for index in drawn.groups],
            replaced=[self._pop(index) for index in drawn.replaced],
            dropped=dropped,
        )

    async def note_begun(self, version: PolicyVersion) -> None:
        """Called while calls are held, before the next version: whatever has begun may have tokens of this one."""
        if not self._asked:
            return
        waiting = await self._client.open_rollouts(RunId(self._config.name), [RolloutState.QUEUING])
        queued = Counter(rollout.spec.group for rollout in waiting)
        size = self._config.train.group_size
        self._schedule.began([index for index in self._asked if queued[self._id(index)] < size], version)

    def begin(self, evaluation: PendingEvaluation) -> None:
        """Its rollouts are asked for; they are collected while anything is waited for."""
        self._evaluations.append(evaluation)

    async def finish(self, evaluation: PendingEvaluation) -> None:
        """Wait for its last rollout."""
        while not evaluation.is_complete:
            await self._take_next()

    async def finish_evaluations(self) -> None:
        """Wait for all of them."""
        for evaluation in self._evaluations:
            await self.finish(evaluation)

    async def _ask(self, index: int, version: PolicyVersion, oldest: int | None) -> None:
        self._asked[index] = version
        self._schedule.ask(index, oldest)
        [position] = task_order(len(self._tasks), index, 1, seed=self._config.seed)
        await self._feed.start(
            self._tasks[position],
            group=self._id(index),
            size=self._config.train.group_size,
            is_train=True,
            temperature=self._config.sampling.temperature,
        )

    async def _take_next(self) -> None:
        group = await self._feed.next_group()
        for evaluation in self._evaluations:
            if evaluation.take(group):
                return
        index = int(group.id.removeprefix(f"{self._lineage}-"))
        versions = group_versions(group)
        self._ended[index] = group
        if _is_too_little(group):
            self._drop(index)
        else:
            self._schedule.end(index, versions and versions[0], teaches=self._teaches(group))

    async def _cut_late(self, version: PolicyVersion) -> None:
        def unfinished(index: int) -> Sequence[RolloutId]:
            return () if index in self._cut else self._feed.unfinished(self._id(index))

        index = self._schedule.late(version, lambda index: len(unfinished(index)))
        if index is not None:
            rollout_ids = unfinished(index)
            self._cut.add(index)
            for rollout_id in rollout_ids:
                await self._client.cancel(rollout_id)

    def _drop(self, index: int) -> None:
        self._schedule.drop(index)
        self._dropped.append(self._pop(index))

    def _pop(self, index: int) -> Group:
        del self._asked[index]
        self._cut.discard(index)
        return self._ended.pop(index)

    def _id(self, index: int) -> GroupId:
        return GroupId(f"{self._lineage}-{index:06d}")


def _is_too_little(group: Group) -> bool:
    """What was cut off leaves nothing to compare."""
    is_cut = any(rollout.outcome is Outcome.CANCELLED for rollout in group.rollouts)
    return is_cut and sum(verdict(rollout) is not None for rollout in group.rollouts) < _MIN_VERDICTS
