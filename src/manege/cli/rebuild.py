"""Steps of a stored run built again, by the trainer's own code, and what they amount to.

Groups come in the order of their completion, as to the trainer, which waits for all groups of a step before it asks for
those of the next. A trainer that goes on with another config cancels what was open, and begins its batch anew: so a
group with a cancelled member, and those of the batch before it, are left out.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from manege.cli.stored import StoredRun
from manege.config import RunConfig
from manege.trainer.batch import Batch, build_batch, is_informative
from manege.trainer.collect import Group
from manege.trainer.credit import verdict
from manege.trainer.schedule import SyncSchedule
from manege.types import TERMINAL, GroupId, Outcome, Rollout

__all__ = ["complete_groups", "rebuild"]


def complete_groups(rollouts: Sequence[Rollout]) -> Iterator[Sequence[Rollout] | None]:
    """Training groups in the order of completion; None where a trainer gave up. `rollouts`: ended ones in the order of
    their completion, then the others."""
    members: dict[GroupId, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.spec.group is not None and rollout.spec.is_train:
            members[rollout.spec.group].append(rollout)
    for group in sorted(members.values(), key=lambda group: group[-1].completion or math.inf):
        if any(rollout.outcome is Outcome.CANCELLED for rollout in group):
            yield None
        elif all(rollout.state in TERMINAL for rollout in group):
            yield group


class _GaveUp(Exception):
    """A trainer stopped here."""


class _NoMore(Exception):
    """All stored groups were drawn."""


async def _ask_nobody() -> None:
    """What is asked for is in the store already."""


class _Stored:
    """Groups of the store, one after the other, as the trainer's feed gives them."""

    def __init__(self, stored: StoredRun, *, call_rewards: bool) -> None:
        self._stored, self._call_rewards = stored, call_rewards
        self._groups = complete_groups(stored.rollouts)

    async def next_group(self) -> Group:
        for rollouts in self._groups:
            if rollouts is None:
                raise _GaveUp
            return await self._stored.group(rollouts, call_rewards=self._call_rewards)
        raise _NoMore


async def rebuild(stored: StoredRun, config: RunConfig) -> Sequence[Mapping[str, Any]]:
    """Numbers of every whole step, drawn by the trainer's schedule: those of metrics.py that need no engine, and those
    of `_gradient`."""
    credit, train = config.credit, config.train
    feed = _Stored(stored, call_rewards=credit.advantage == "returns")

    def is_worth_training(group: Group) -> bool:
        return credit.zero_variance == "keep" or is_informative(group, credit, train.max_sample_tokens)

    steps: list[Mapping[str, Any]] = []
    while True:
        schedule = SyncSchedule(_ask_nobody, feed.next_group, train.groups, keep=is_worth_training)
        try:
            drawn = await schedule.next_batch()
        except _GaveUp:
            continue
        except _NoMore:
            return steps
        batch = build_batch(
            drawn.groups,
            credit,
            success_reward=config.scorer.success_reward,
            rng=random.Random(f"{config.seed}:shuffle:{len(steps)}"),
            num_mini_batches=train.mini_batches,
            # None where the run has none: no call is longer than its engine takes, so the engine's cuts nothing.
            max_sample_tokens=train.max_sample_tokens,
            replaced=drawn.replaced,
        )
        steps.append({"refilled_groups": len(drawn.replaced), **batch.metrics, **_gradient(batch, config)})


def _gradient(batch: Batch, config: RunConfig) -> Mapping[str, float]:
    """Sums over trained tokens: the loss, and |w A|, which is a token's part of the gradient up to its direction, of
    rollouts that succeeded and of the others; and the mean over rollouts of the mean |A| over their tokens.

    The loss is that at the policy that sampled (pi = mu), where every ratio is 1, nothing is clipped, and nothing
    corrected: -A per token for ppo and gspo, -A log mu for cispo; the divergence from a reference apart. Over
    mini-batches it is the mean by trained tokens, like the metric of the run."""
    is_cispo = config.credit.loss == "cispo"
    succeeded = {
        rollout.rollout.spec.id: (verdict(rollout.rollout) or 0.0) >= config.scorer.success_reward
        for rollout in batch.rollouts
    }
    mass, weighted, num_tokens = {True: 0.0, False: 0.0}, 0.0, 0
    for mini_batch in batch.mini_batches:
        loss = 0.0
        for item in mini_batch:
            loss -= item.weight * float((item.advantages_M * (item.sample.logprobs_M if is_cispo else 1.0)).sum())
            mass[succeeded[item.sample.rollout_id]] += item.weight * float(np.abs(item.advantages_M).sum())
        size = sum(item.sample.num_trained for item in mini_batch)
        weighted, num_tokens = weighted + loss * size, num_tokens + size
    sizes = [
        float(np.abs(np.concatenate(rollout.advantages)).mean()) if rollout.advantages else 0.0
        for rollout in batch.rollouts
        if rollout.reward is not None
    ]
    return {
        "loss": weighted / max(1, num_tokens),
        "mass_success": mass[True],
        "mass_failure": mass[False],
        "advantage_size": sum(sizes) / max(1, len(sizes)),
    }
