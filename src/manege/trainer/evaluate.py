"""Success on held-out tasks, with an interval.

An evaluation may run beside training: its rollouts are collected as they end, and the versions that sampled them say
which policy it was.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manege.trainer.collect import Group, GroupFeed
from manege.trainer.diagnosis import check_infrastructure
from manege.trainer.staleness import group_versions
from manege.types import GroupId, Rollout, Task

__all__ = ["Evaluation", "PendingEvaluation", "wilson"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One pass over held-out tasks at one temperature."""

    temperature: float
    num_tasks: int
    num_success: int
    reward_mean: float
    """No verdict counts as 0 here: an evaluation asks what a user would get."""
    versions: tuple[int, int] | None
    """The oldest and the newest that sampled it; None: no agent made a call."""

    @property
    def success_rate(self) -> float:
        """Share of tasks solved."""
        return self.num_success / self.num_tasks


class PendingEvaluation:
    """One rollout per task, in validation mode at a fixed temperature."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        name: str,
        temperature: float,
        success_reward: float,
        on_complete: Callable[["Evaluation"], None] = lambda _: None,
    ) -> None:
        """What was asked for under the same `name` and temperature is not done again."""
        self.temperature = temperature
        self._success_reward, self._on_complete = success_reward, on_complete
        self._tasks = {GroupId(f"{name}-{temperature}-{position:04d}"): task for position, task in enumerate(tasks)}
        self._waiting = set(self._tasks)
        self._rollouts: list[Rollout] = []
        self._versions: set[int] = set()

    async def start(self, feed: GroupFeed) -> None:
        """Ask for its rollouts."""
        for group, task in self._tasks.items():
            await feed.start(task, group=group, size=1, is_train=False, temperature=self.temperature)

    @property
    def is_complete(self) -> bool:
        """Whether all have ended."""
        return not self._waiting

    def take(self, group: Group) -> bool:
        """A group that has ended; returns whether it is of this evaluation. Raises TrainerError where nothing but the
        infrastructure would be evaluated."""
        if group.id not in self._waiting:
            return False
        self._waiting.remove(group.id)
        self._rollouts += group.rollouts
        self._versions.update(group_versions(group) or ())
        check_infrastructure(self._rollouts, len(self._tasks))
        if self.is_complete:
            self._on_complete(self.result())
        return True

    def result(self) -> Evaluation:
        """Once it is complete."""
        rewards = [rollout.reward or 0.0 for rollout in self._rollouts]
        return Evaluation(
            temperature=self.temperature,
            num_tasks=len(rewards),
            num_success=sum(reward >= self._success_reward for reward in rewards),
            # Exactly, since they come in the order of completion.
            reward_mean=math.fsum(rewards) / len(rewards),
            versions=(min(self._versions), max(self._versions)) if self._versions else None,
        )


def wilson(num_success: int, num_tasks: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927); sound near 0 and 1, where the normal one is not."""
    z = 1.959964
    share, spread = num_success / num_tasks, z * z / num_tasks
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / num_tasks + spread / (4 * num_tasks)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
