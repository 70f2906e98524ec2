"""Our loss in verl's worker: the same as everywhere (`micro_loss`), on the log-probabilities that verl computed.

verl's own losses know no rollouts, and a weight cannot be folded into the advantages of a sequence-level ratio: so none
of them is used, and nothing has to be refused. verl averages gradients over the ranks; what is a sum here is therefore
multiplied by their number.

Shape legend: N tokens of a micro-batch, sample after sample, M trained ones.
"""

# pyright: reportMissingImports=false
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils

from manege.errors import TrainerError
from manege.trainer.algo.samples import Sample
from manege.trainer.engines.base import WeightedSample
from manege.trainer.engines.micro_loss import micro_loss
from manege.trainer.engines.step_sums import StepSums
from manege.trainer.objective import Objective
from manege.types import FloatArray

__all__ = ["StepLoss", "trained", "worker_batch"]

_PADDING = torch.zeros(2, dtype=torch.long)
"""A sample without a trained token."""


def worker_batch(samples: Sequence[Sample], num_rows: int, *, micro_batch_tokens: int, entropy: bool) -> TensorDict:
    """What verl's engine reads: a row per sample, and padding up to `num_rows`, which is the same on all ranks."""
    for sample in samples:
        if any(span.start == 0 for span in sample.spans):
            raise TrainerError(f"rollout {sample.rollout_id}: the first token of a sample cannot be a sampled one")
    num_padding = num_rows - len(samples)
    ids = [torch.from_numpy(sample.ids_T).long() for sample in samples] + [_PADDING] * num_padding
    masks = [torch.from_numpy(sample.mask_T).long() for sample in samples] + [_PADDING] * num_padding
    tensors = {
        "input_ids": _nested(ids),
        "position_ids": _nested([torch.arange(len(row)) for row in ids]),
        "loss_mask": _nested(masks),
        "row": torch.arange(num_rows),
    }
    heats = [sample.temperature for sample in samples] or [1.0]
    plain = {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": max(micro_batch_tokens, *map(len, ids)),
        "calculate_entropy": entropy,
    }
    if len(set(heats)) == 1:
        plain["temperature"] = heats[0]
    else:
        tensors["temperature"] = torch.tensor(heats + [1.0] * num_padding)
    return tensordict_utils.get_tensordict(tensors, plain)


def trained(values_N: Tensor, starts: Sequence[int], samples: Sequence[Sample]) -> Tensor:
    """(M,): of the positions that predict the trained tokens of samples that begin at `starts`."""
    rows_M = np.concatenate([start + sample.positions_M - 1 for start, sample in zip(starts, samples, strict=True)])
    return values_N[torch.from_numpy(rows_M).long().to(values_N.device)]


class StepLoss:
    """Of one optimiser step on one rank; called by verl's engine with each micro-batch, and keeps the sums of all."""

    def __init__(
        self, batch: Sequence[WeightedSample], objective: Objective, reference: Sequence[FloatArray] | None
    ) -> None:
        """`reference`: the reference's log-probabilities of each sample's trained tokens."""
        self._batch, self._objective, self._reference = batch, objective, reference
        self.sums = StepSums()

    def __call__(
        self, model_output: dict[str, Any], data: TensorDict, dp_group: dist.ProcessGroup | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The micro-batch's loss, and no metrics of verl's kind."""
        logprobs_N = model_output["log_probs"].values().float()
        begins = data["input_ids"].offsets().tolist()
        rows = [
            (row, begin) for row, begin in zip(data["row"].tolist(), begins, strict=False) if row < len(self._batch)
        ]
        if not rows:
            # The other ranks wait for this one's gradient.
            return logprobs_N.sum() * 0.0, {}
        batch = [self._batch[row] for row, _ in rows]
        samples, starts = [item.sample for item in batch], [begin for _, begin in rows]
        logprobs_M = trained(logprobs_N, starts, samples)

        reference_M = None
        if self._reference is not None:
            parts = np.concatenate([self._reference[row] for row, _ in rows])
            reference_M = torch.from_numpy(parts).to(logprobs_M.device, logprobs_M.dtype)
        found = micro_loss(batch, logprobs_M, self._objective, reference_M=reference_M)
        entropy_M = trained(model_output["entropy"].values().float(), starts, samples)
        self.sums.add(samples, found, entropy_M=entropy_M, num_nodes=sum(sample.num_tokens for sample in samples))
        return found.loss * dist.get_world_size(dp_group), {}


def _nested(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
