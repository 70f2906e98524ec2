"""Success on held-out tasks, with an interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from manege.trainer.collect import GroupFeed
from manege.trainer.diagnosis import check_infrastructure
from manege.types import GroupId, Rollout, Task

__all__ = ["Evaluation", "evaluate", "wilson"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One pass over held-out tasks at one temperature."""

    temperature: float
    num_tasks: int
    num_success: int
    reward_mean: float
    """No verdict counts as 0 here: an evaluation asks what a user would get."""

    @property
    def success_rate(self) -> float:
        """Share of tasks solved."""
        return self.num_success / self.num_tasks


async def evaluate(
    feed: GroupFeed, tasks: Sequence[Task], *, name: str, temperature: float, success_reward: float
) -> Evaluation:
    """One rollout per task, in validation mode at a fixed temperature. What was asked for under the same `name` and
    temperature is not done again. Raises TrainerError where nothing but the infrastructure would be evaluated."""
    for position, task in enumerate(tasks):
        group = GroupId(f"{name}-{temperature}-{position:04d}")
        await feed.start(task, group=group, size=1, is_train=False, temperature=temperature)
    rollouts: list[Rollout] = []
    for _ in tasks:
        rollouts += (await feed.next_group()).rollouts
        check_infrastructure(rollouts, len(tasks))
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    return Evaluation(
        temperature=temperature,
        num_tasks=len(tasks),
        num_success=sum(reward >= success_reward for reward in rewards),
        # Exactly, since they come in the order of completion.
        reward_mean=math.fsum(rewards) / len(rewards),
    )


def wilson(num_success: int, num_tasks: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927); sound near 0 and 1, where the normal one is not."""
    z = 1.959964
    share, spread = num_success / num_tasks, z * z / num_tasks
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / num_tasks + spread / (4 * num_tasks)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
