"""Steps of a stored run built again, by the trainer's own code, and what they amount to.

Groups come in the order of their completion, as to the trainer with `sync`, which waits for all groups of a step before
it asks for those of the next; with `async` a step may have trained others. A trainer that goes on with another config
cancels what was open, and begins its batch anew: so a group with a cancelled member, and those of the batch before it,
are left out.
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
from manege.trainer.schedule import Schedule
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


async def rebuild(stored: StoredRun, config: RunConfig) -> Sequence[Mapping[str, Any]]:
    """Numbers of every whole step, drawn by the trainer's schedule: those of metrics.py that need no engine, and those
    of `_gradient`."""
    credit, train = config.credit, config.train.model_copy(update={"schedule": "sync"})
    names = sorted({rollout.spec.group for rollout in stored.rollouts if rollout.spec.group is not None})
    indices = {name: index for index, name in enumerate(names)}
    steps: list[Mapping[str, Any]] = []
    schedule, groups = Schedule(train), dict[int, Group]()
    for rollouts in complete_groups(stored.rollouts):
        if rollouts is None:
            schedule, groups = Schedule(train), {}
            continue
        group = await stored.group(rollouts, call_rewards=credit.advantage == "returns")
        index = indices[group.id]
        groups[index] = group
        schedule.ask(index)
        worth = credit.zero_variance == "keep" or is_informative(group, credit, train.max_sample_tokens)
        schedule.end(index, None, teaches=worth)
        if (drawn := schedule.draw(0)) is not None:
            taken, replaced = ([groups.pop(index) for index in each] for each in (drawn.groups, drawn.replaced))
            steps.append(_step(taken, replaced, config, len(steps)))
    return steps


def _step(groups: Sequence[Group], replaced: Sequence[Group], config: RunConfig, num_before: int) -> Mapping[str, Any]:
    batch = build_batch(
        groups,
        config.credit,
        success_reward=config.scorer.success_reward,
        rng=random.Random(f"{config.seed}:shuffle:{num_before}"),
        num_mini_batches=config.train.mini_batches,
        # None where the run has none: no call is longer than its engine takes, so the engine's cuts nothing.
        max_sample_tokens=config.train.max_sample_tokens,
        replaced=replaced,
    )
    return {"refilled_groups": len(replaced), **batch.metrics, **_gradient(batch, config)}


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
