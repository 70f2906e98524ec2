"""Steps of a stored run built again, by the trainer's own code, and what they amount to.

Groups come in the order of their completion, as to the trainer. A trainer that stops cancels what it waits for, and the
next one begins its batch anew: so a group with a cancelled member, and those of the batch before it, are left out.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from manege.cli.stored import StoredRun
from manege.config import RunConfig
from manege.trainer.algo.ledger import Reason
from manege.trainer.batch import Batch, build_batch, is_informative
from manege.trainer.collect import Group
from manege.trainer.credit import CreditedRollout, verdict
from manege.trainer.schedule import SyncSchedule
from manege.types import TERMINAL, GroupId, Outcome, Rollout

__all__ = ["Rebuild", "Sums", "complete_groups"]


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


@dataclass(slots=True, kw_only=True)
class Sums:
    """Over the steps; means are formed at the end."""

    steps: int = 0
    groups: int = 0
    refilled: int = 0
    """Groups that others stand for."""
    informative: int = 0
    rollouts: int = 0
    judged: int = 0
    """Rollouts with a reward that counts."""
    samples: int = 0
    with_samples: int = 0
    with_one_sample: int = 0
    tokens: Counter[Reason] = field(default_factory=Counter)
    """The ledger."""
    context: int = 0
    call_tokens: int = 0
    """Prompts and answers of all calls."""
    unique_tokens: int = 0
    """The same, shared prefixes counted once."""
    advantage: float = 0.0
    """Mean |A| over the trained tokens of a rollout, summed over rollouts with a reward."""
    loss: float = 0.0
    mass_success: float = 0.0
    """Sum of |w A| over the trained tokens of rollouts that succeeded: their share of the gradient, up to its
    direction."""
    mass_failure: float = 0.0


class _GaveUp(Exception):
    """A trainer stopped here."""


class _NoMore(Exception):
    """All stored groups were drawn."""


async def _ask_nobody() -> None:
    """What is asked for is in the store already."""


class Rebuild:
    """One way of giving credit to the groups of a run."""

    def __init__(self, stored: StoredRun, config: RunConfig) -> None:
        self._stored, self._config = stored, config
        self._groups = complete_groups(stored.rollouts)
        # As a run that was never resumed draws.
        self._rng = random.Random(f"{config.seed}:shuffle:0")
        self.sums = Sums()
        self.steps: list[Mapping[str, Any]] = []
        """Metrics of each step, by the names of metrics.py."""

    async def run(self) -> None:
        """All whole steps, drawn by the trainer's schedule."""
        train = self._config.train
        while True:
            schedule = SyncSchedule(_ask_nobody, self._next_group, train.groups, keep=self._is_worth_training)
            try:
                drawn = await schedule.next_batch()
            except _GaveUp:
                continue
            except _NoMore:
                return
            batch = build_batch(
                drawn.groups,
                self._config.credit,
                success_reward=self._config.scorer.success_reward,
                rng=self._rng,
                num_mini_batches=train.mini_batches,
                # None where the run has none: no call is longer than its engine takes, so the engine's cuts nothing.
                max_sample_tokens=train.max_sample_tokens,
                replaced=drawn.replaced,
            )
            self._take(batch, len(drawn.groups), len(drawn.replaced))

    async def _next_group(self) -> Group:
        try:
            rollouts = next(self._groups)
        except StopIteration as end:
            raise _NoMore from end
        if rollouts is None:
            raise _GaveUp
        return await self._stored.group(rollouts, call_rewards=self._config.credit.advantage == "returns")

    def _is_worth_training(self, group: Group) -> bool:
        credit = self._config.credit
        return credit.zero_variance == "keep" or is_informative(group, credit, self._config.train.max_sample_tokens)

    def to_json(self) -> Mapping[str, Any]:
        """For `--json`."""
        tokens = {reason.value: count for reason, count in self.sums.tokens.items()}
        return {**asdict(self.sums), "tokens": tokens, "by_step": self.steps}

    def _take(self, batch: Batch, num_groups: int, num_replaced: int) -> None:
        sums, loss = self.sums, self._loss(batch)
        self.steps.append({"refilled_groups": num_replaced, **batch.metrics, "loss": loss})
        sums.steps += 1
        sums.groups += num_groups
        sums.refilled += num_replaced
        sums.informative += batch.metrics["informative_groups"]
        sums.tokens.update(batch.ledger.tokens)
        sums.context += batch.ledger.context
        sums.loss += loss
        for rollout in batch.rollouts:
            sums.rollouts += 1
            sums.unique_tokens += rollout.forest.num_unique
            sums.call_tokens += sum(len(call.prompt_ids_P) + len(call.response_ids_R) for call in rollout.forest.calls)
            if rollout.reward is not None:
                sums.judged += 1
                sums.samples += len(rollout.samples)
                sums.with_samples += bool(rollout.samples)
                sums.with_one_sample += len(rollout.samples) == 1
                sums.advantage += _mean_size(rollout)
        self._weigh(batch)

    def _weigh(self, batch: Batch) -> None:
        rewards = {rollout.rollout.spec.id: verdict(rollout.rollout) for rollout in batch.rollouts}
        for item in batch.samples:
            mass = item.weight * float(np.abs(item.advantages_M).sum())
            if (rewards[item.sample.rollout_id] or 0.0) >= self._config.scorer.success_reward:
                self.sums.mass_success += mass
            else:
                self.sums.mass_failure += mass

    def _loss(self, batch: Batch) -> float:
        """At the policy that sampled (pi = mu), where every ratio is 1, nothing is clipped, and nothing corrected:
        -A per token for ppo and gspo, -A log mu for cispo; the divergence from a reference apart. Mean over the
        trained tokens, like the metric of the run."""
        is_cispo = self._config.credit.loss == "cispo"
        losses = [
            sum(
                -item.weight * float((item.advantages_M * (item.sample.logprobs_M if is_cispo else 1.0)).sum())
                for item in mini_batch
            )
            for mini_batch in batch.mini_batches
        ]
        num_tokens = [sum(item.sample.num_trained for item in mini_batch) for mini_batch in batch.mini_batches]
        return float(np.dot(losses, num_tokens)) / max(1, sum(num_tokens))


def _mean_size(rollout: CreditedRollout) -> float:
    """Mean |A| over its trained tokens."""
    return float(np.abs(np.concatenate(rollout.advantages)).mean()) if rollout.advantages else 0.0
