"""Our credit in verl's words: an advantage estimator `manege` and a policy loss `manege`.

verl asks for advantages once per batch that its trainer draws, with all its rows, then cuts the rows into optimiser
steps and micro-batches. The estimator reads from verl's queue what `rows.py` put there and gives w * A for each trained
token, with the weights of `trainer/algo/weights.py` over the whole batch. The loss of a token is positively homogeneous
in its advantage, so the loss sums l(w A) = w l(A) over tokens, whatever row or micro-batch they are in: that is the
gradient of our own trainer, exactly, if the batch is one optimiser step (`trainers.py`).

Ratios are verl's: pi / old, where `algorithm.rollout_correction` says what the old policy is, and weighs and masks.

Shape legend: B rows, R response tokens, padded to the longest.
"""
# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manege.errors import TrainerError
from manege.trainer.algo.weights import sample_weight
from manege.trainer.losses.ppo import ppo_loss

__all__ = ["FIELDS", "batch_advantages", "policy_loss", "weigh"]

FIELDS = ("manege_advantages", "manege_share")
"""What a row brings in verl's queue, beside verl's own fields."""


def batch_advantages(*, response_mask: Tensor, index: Sequence[str], **_: Any) -> tuple[Tensor, Tensor]:
    """verl's contract of an advantage estimator: advantages and returns, (B, R) each. `index`: the keys of the rows in
    verl's queue; rows with another one are verl's padding. Raises TrainerError if the rows are not ours."""
    import transfer_queue as queue

    keys = [str(key) for key in index]
    ours = [row for row, key in enumerate(keys) if key.count("_") == 2]
    if not ours:
        raise TrainerError(
            'algorithm.adv_estimator = "manege" got no row of manege\'s; set '
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class=manege.verl.manager.AgentLoopManager"
        )
    found = queue.kv_batch_get(keys=[keys[row] for row in ours], partition_id="train", select_fields=list(FIELDS))
    advantages = [torch.as_tensor(values_R) for values_R in found["manege_advantages"].unbind()]
    # A list of the queue's own kind, of plain or of wrapped values.
    shares = [getattr(item, "data", item) for item in list(found["manege_share"])]
    result_BR = torch.zeros(response_mask.shape, dtype=torch.float32)
    for row, advantages_R, weight in zip(ours, advantages, weigh(shares), strict=True):
        result_BR[row, : len(advantages_R)] = weight * advantages_R.float()
    # What verl's rollout correction rejects has left the mask.
    result_BR = result_BR * response_mask.float()
    return result_BR, result_BR


def weigh(shares: Sequence[Mapping[str, Any]]) -> Sequence[float]:
    """The weight of each row, from the shares of all rows of an optimiser step."""
    groups = {share["group"]: share for share in shares}.values()
    num_rollouts = sum(group["group_rollouts"] for group in groups)
    num_samples = sum(group["group_samples"] for group in groups)
    num_tokens = sum(group["group_tokens"] for group in groups)
    return [
        sample_weight(
            share["weighting"],
            num_rollouts=num_rollouts,
            num_samples=num_samples,
            num_tokens=num_tokens,
            rollout_tokens=share["rollout_tokens"],
            sample_tokens=share["sample_tokens"],
            constant_tokens=share["constant_tokens"],
        )
        if share["sample_tokens"]
        else 0.0
        for share in shares
    ]


def policy_loss(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, dict[str, float]]:
    """verl's contract of a policy loss: a number and metrics. PPO's clip with `actor.clip_ratio_low`,
    `clip_ratio_high` and `clip_ratio_c`, summed: the weights are in the advantages, and `loss_agg_mode` has no say."""
    mask_BR = response_mask.bool()
    loss_M, clipped_M = ppo_loss(
        (log_prob - old_log_prob)[mask_BR],
        advantages[mask_BR],
        clip_low=config.clip_ratio_low,
        clip_high=config.clip_ratio_high,
        dual_clip=config.clip_ratio_c,
    )
    if rollout_is_weights is not None:
        loss_M = rollout_is_weights[mask_BR] * loss_M
    # verl averages gradients over its data-parallel ranks.
    loss = loss_M.sum() * config.global_batch_info["dp_size"]
    num_tokens = max(1, int(mask_BR.sum()))
    with torch.no_grad():
        kl = float((old_log_prob - log_prob)[mask_BR].sum()) / num_tokens
        return loss, {"actor/pg_clipfrac": float(clipped_M.sum()) / num_tokens, "actor/ppo_kl": kl}
