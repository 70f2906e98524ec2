"""The section `train` of a run file: how much, how fast, and when (docs/concepts/async.md).

A key that would do nothing is refused, as in `credit_config`: one that is set to something else than its default while
the key that gives it a meaning is not.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from manege.section import PositiveFloat, PositiveInt, Section

__all__ = ["TrainConfig"]


class TrainConfig(Section):
    """The optimisation."""

    steps: PositiveInt = 100
    schedule: Literal["sync", "async"] = "sync"
    """`async`: more groups are under way than a step trains on, and a step begins as soon as it has enough."""
    groups: PositiveInt = 4
    """Groups per step."""
    async_groups: PositiveInt | None = None
    """Groups under way at once with `async`; None: twice `groups`."""
    max_staleness: PositiveInt = 4
    """Versions that may lie between the oldest token of a group and the weights that it trains."""
    staleness_policy: Literal["wait", "drop"] = "wait"
    """Rollouts that the next step would make too old: it waits for them, or cuts them off."""
    max_dropped_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """`drop` becomes `wait` where more of a run's rollouts than this would be cut off."""
    inflight: Literal["drain", "abort_continue", "keep"] = "drain"
    """Answers under way when weights change: waited for (`drain_s` at most, then as the next), cut and continued from
    their tokens under the new weights, or continued over the cache that they have."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 10
    """How long `drain` holds an update up."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per group."""
    mini_batches: PositiveInt = 1
    """Optimiser steps per batch, each on a part of its rollouts; a rollout is never divided."""
    max_sample_tokens: PositiveInt | None = None
    """The longest sample; what lies beyond is counted as truncated. None: what the train engine takes."""
    learning_rate: PositiveFloat = 2e-5
    warmup_steps: Annotated[int, Field(ge=0)] = 2
    """Steps over which the learning rate rises to its value."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: PositiveFloat = 1.0
    frozen: list[str] = Field(default_factory=list)
    """Parameters whose name contains one of these are not trained."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Train adapters of this rank beside the weights, which stay as they are; 0: train the weights themselves. Adapters
    want about ten times their learning rate."""
    lora_alpha: PositiveFloat | None = None
    """What an adapter adds is scaled by lora_alpha / lora_rank; None: twice the rank."""
    lora_targets: list[str] = Field(default_factory=list)
    """Linear layers that get one, by the last part of their names, `q_proj`; none given: all but the head."""
    gradient_checkpointing: bool = False
    """Keep only what lies between the layers for the backward pass and compute the rest again: far less memory for a
    third more time."""
    prefix_tree: bool = True
    """Compute tokens that samples share as a prefix once, by default where the train engine can."""
    micro_batch_tokens: PositiveInt = 1024
    """Tokens (unique ones with the prefix tree) per forward and backward pass."""
    stop_success: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop early when the success rate of the last three steps has this mean; None: never."""
    checkpoint_every: PositiveInt = 5
    """Steps between checkpoints; the last step always leaves one."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept, the newest ones; each is the model and about twice its size for the optimiser."""
    max_failed_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Stop with a diagnosis when more of a step's rollouts than this have no model call or no verdict."""

    @model_validator(mode="after")
    def _a_rollout_per_mini_batch(self) -> "TrainConfig":
        if self.mini_batches > (num_rollouts := self.groups * self.group_size):
            raise ValueError(
                f"mini_batches = {self.mini_batches}: a step has groups * group_size = {num_rollouts} rollouts, and "
                "none is divided"
            )
        return self

    @property
    def active_groups(self) -> int:
        """Groups under way at once."""
        return self.groups if self.schedule == "sync" else self.async_groups or 2 * self.groups

    @model_validator(mode="after")
    def _a_schedule_that_can_be(self) -> "TrainConfig":
        for key, needs, holds in (
            ("async_groups", 'schedule = "async"', self.schedule == "async"),
            ("max_staleness", 'schedule = "async"', self.schedule == "async"),
            ("staleness_policy", 'schedule = "async"', self.schedule == "async"),
            ("max_dropped_fraction", 'staleness_policy = "drop"', self.staleness_policy == "drop"),
            ("drain_s", 'inflight = "drain"', self.inflight == "drain"),
            ("lora_alpha", "lora_rank > 0", self.lora_rank > 0),
            ("lora_targets", "lora_rank > 0", self.lora_rank > 0),
            ("frozen", "lora_rank = 0; with adapters lora_targets says what is trained", self.lora_rank == 0),
        ):
            default = TrainConfig.model_fields[key].get_default(call_default_factory=True)
            if getattr(self, key) != default and not holds:
                raise ValueError(f"{key} = {getattr(self, key)!r} does nothing here: it needs {needs}")
        if self.schedule == "async" and self.active_groups <= self.groups:
            raise ValueError(
                f'async_groups = {self.active_groups}: with schedule = "async" more groups than groups = {self.groups} '
                "are under way"
            )
        if self.schedule == "async" and self.active_groups > (most := (self.max_staleness + 1) * self.groups):
            raise ValueError(
                f"async_groups = {self.active_groups}: the last of them would wait longer than max_staleness = "
                f"{self.max_staleness} allows; at most (max_staleness + 1) * groups = {most}"
            )
        return self
