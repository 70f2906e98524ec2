"""verl's trainers with whole rollouts: what is drawn together is one optimiser step.

verl pads its rows to a multiple of `ppo_mini_batch_size * rollout.n` and steps once per such number of rows. Where a
rollout has more than one sample, these are more steps than were asked for, and a rollout's samples may be in different
ones. These trainers step once per batch that they draw: `data.train_batch_size` prompts, or that by
`parameter_sync_step` in `manege_separate_async`, however many rows they have.
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import logging
import math
from collections.abc import MutableMapping
from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

__all__ = ["WholeColocateAsync", "WholeSeparateAsync", "WholeSync"]


class _Whole:
    """Over one of verl's trainers."""

    config: DictConfig
    use_critic: bool
    verl_mode: str
    """Under which verl's own code knows it."""

    def __init__(self, config: DictConfig) -> None:
        asked, config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode, self.verl_mode
        super().__init__(config)  # pyright: ignore[reportCallIssue] - of verl's class
        config.trainer.v1.trainer_mode = asked

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        critic = self.config.critic.ppo_mini_batch_size if self.use_critic else 1
        # Micro-batches of a fixed number of rows have to come out even on every rank.
        update = 1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu or 1
        logprobs = 1 if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu or 1
        return math.lcm(dp_size * update, dp_size * logprobs, rollout.n * critic)

    def _update_actor(self, batch: Any, metrics: MutableMapping[str, Any]) -> Any:
        actor, size = self.config.actor_rollout_ref.actor, len(batch) // self.config.actor_rollout_ref.rollout.n
        asked, actor.ppo_mini_batch_size = actor.ppo_mini_batch_size, size
        try:
            return super()._update_actor(batch, metrics)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            actor.ppo_mini_batch_size = asked


@register_trainer("manege_sync")
class WholeSync(_Whole, PPOTrainerSync):
    """`sync`: generate, then train."""

    verl_mode = "sync"


@register_trainer("manege_colocate_async")
class WholeColocateAsync(_Whole, PPOTrainerColocateAsync):
    """`colocate_async`: rollouts outlive updates, on the same machines."""

    verl_mode = "colocate_async"


@register_trainer("manege_separate_async")
class WholeSeparateAsync(_Whole, PPOTrainerSeparateAsync):
    """`separate_async`: rollouts and updates at once, on machines of their own."""

    verl_mode = "separate_async"

    def _setup(self) -> None:
        # With hybrid_engine=False verl 0.9.1 gives a log line an argument that no logger takes.
        log = logging.getLogger(PPOTrainerSeparateAsync.__module__)
        asked = log.level
        log.setLevel(logging.WARNING)
        try:
            super()._setup()
        finally:
            log.setLevel(asked)
