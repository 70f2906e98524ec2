"""Several rollouts of each of many tasks, in validation mode, and what they came to.

However many tasks there are, only as many are under way as keep the controller busy; so tasks may be read while they
are tried. What was asked for under the same names is found again, not done again.
"""

import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import orjson

from manege.trainer.collect import Group, GroupFeed
from manege.trainer.diagnosis import check_infrastructure
from manege.types import GroupId, Outcome, Rollout, Task

__all__ = ["Tried", "repeated", "tried"]

_PATIENCE = 8
"""Rollouts lost to the infrastructure before any that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A task after its rollouts."""

    task: Task
    num_rollouts: int
    num_success: int
    """No verdict is no success: the question is what a user would get."""
    num_lost: int
    """Rollouts that failed for a reason that is not their agent's."""
    rewards: Sequence[float | None]
    num_calls: int
    """Of all its rollouts, as are ..."""
    num_prompt_tokens: int
    """... tokens read; with those that an engine may have had in its cache, and ..."""
    num_sampled_tokens: int
    """... tokens written."""
    seconds: float
    """From the start of each rollout's last attempt to its end, added up."""


async def repeated(
    feed: GroupFeed, tasks: Iterable[Task], *, name: str, size: int, temperature: float | None, slots: int
) -> AsyncIterator[Group]:
    """Groups of `size` rollouts as they end. `slots`: rollouts that can be carried out at once. Raises TrainerError
    when the first ones were all lost to the infrastructure."""
    at_once = max(2, -(-2 * slots // size))
    waiting, lost = set[GroupId](), list[Rollout]()
    coming, works = iter(tasks), False
    while True:
        while len(waiting) < at_once and (task := next(coming, None)) is not None:
            group = GroupId(f"{name}-{_digest(task)}")
            await feed.start(task, group=group, size=size, is_train=False, temperature=temperature)
            waiting.add(group)
        if not waiting:
            return
        group = await feed.next_group()
        waiting.discard(group.id)
        works = works or any(rollout.outcome is not Outcome.INFRA_ERROR for rollout in group.rollouts)
        if not works:
            lost += group.rollouts
            check_infrastructure(lost, _PATIENCE if waiting else len(lost))
        yield group


def tried(group: Group, *, success_reward: float) -> Tried:
    """What a group came to."""
    rewards = [rollout.reward for rollout in group.rollouts]
    calls = [call for calls in group.calls for call in calls]
    return Tried(
        task=group.task,
        num_rollouts=len(rewards),
        num_success=sum((reward or 0.0) >= success_reward for reward in rewards),
        num_lost=sum(rollout.outcome is Outcome.INFRA_ERROR for rollout in group.rollouts),
        rewards=rewards,
        num_calls=len(calls),
        num_prompt_tokens=sum(len(call.prompt_ids_P) for call in calls),
        num_sampled_tokens=sum(len(call.response_ids_R) for call in calls),
        seconds=sum(_seconds(rollout) for rollout in group.rollouts),
    )


def _digest(task: Task) -> str:
    whole = orjson.dumps([task.id, task.input, task.hidden], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(whole).hexdigest()[:16]


def _seconds(rollout: Rollout) -> float:
    return (rollout.ended_s - rollout.started_s) if rollout.started_s and rollout.ended_s else 0.0
