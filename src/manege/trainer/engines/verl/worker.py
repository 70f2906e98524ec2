"""A rank: verl's TrainingWorker, with the steps of a TrainEngine as its methods.

The driver gives each data-parallel rank its share of a batch and the number of rows that all have; a rank answers only
if it is the first of its model-parallel group. Weights, optimiser, sharding, micro-batches and checkpoints are verl's.
"""

# pyright: reportMissingImports=false
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from manege.trainer.algo.samples import Sample
from manege.trainer.engines.base import WeightedSample
from manege.trainer.engines.step_sums import StepSums
from manege.trainer.engines.verl.loss import StepLoss, trained, worker_batch
from manege.trainer.engines.verl.shards import Kept, exchanged, shards
from manege.trainer.objective import Objective
from manege.types import FloatArray

__all__ = ["Place", "RankWorker"]

_FILE_BYTES = 5 * 2**30
"""Weights are written file after file, so that rank 0 never holds all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the driver has to know of a rank."""

    data_rank: int
    """Whose share of a batch it takes."""
    answers: bool
    """The first of its model-parallel group."""
    num_parameters: int
    """Of the whole model."""
    machine: str
    """Its address in Ray's cluster."""
    pid: int


class RankWorker(TrainingWorker):
    """An actor of Ray's."""

    def __init__(self, config: TrainingWorkerConfig, *, keep_reference: bool) -> None:
        """`keep_reference`: a KL term needs the weights as they are now. Needs an engine with torch parameters."""
        super().__init__(config)
        self.reset()
        self._reference = [shard.cpu().clone() for shard in shards(self.engine.module)] if keep_reference else None
        self._kept: Kept | None = None

    def place(self) -> Place:
        """Of this rank."""
        modules = self.engine.module if isinstance(self.engine.module, list) else [self.engine.module]
        return Place(
            data_rank=self.engine.get_data_parallel_rank(),
            answers=self.engine.is_mp_src_rank_with_outputs(),
            num_parameters=sum(parameter.numel() for module in modules for parameter in module.parameters()),
            machine=ray.util.get_node_ip_address(),
            pid=os.getpid(),
        )

    def logprobs(self, samples: Sequence[Sample], num_rows: int) -> Sequence[FloatArray] | None:
        """(M,) each, of the trained tokens."""
        data = worker_batch(samples, num_rows, micro_batch_tokens=self._micro_batch_tokens, entropy=False)
        self._with_defaults(data)
        with self.engine.eval_mode():
            output = self.engine.infer_batch(data)
        self._divide()
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        values = output["model_output"]["log_probs"]
        rows = [row.float().cpu() for row in values.unbind()[: len(samples)]]
        return [trained(row, [0], [sample]).numpy() for row, sample in zip(rows, samples, strict=True)]

    def step(
        self, batch: Sequence[WeightedSample], num_rows: int, objective: Objective, learning_rate: float
    ) -> tuple[StepSums, float] | None:
        """The share's sums and the norm of the whole gradient; neither weights nor optimiser have changed where that or
        the loss is not finite."""
        samples = [item.sample for item in batch]
        reference = None
        if objective.kl > 0:
            assert self._reference is not None, "the driver refuses a KL term without a reference"
            with exchanged(self.engine.module, self._reference):
                reference = self.logprobs(samples, num_rows)
        loss = StepLoss(batch, objective, reference)
        data = worker_batch(samples, num_rows, micro_batch_tokens=self._micro_batch_tokens, entropy=True)
        self._with_defaults(data)
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            self.engine.forward_backward_batch(data, loss)
            norm = math.nan
            if self._all_finite(loss.sums.loss):
                for group in self.engine.optimizer.param_groups:
                    group["lr"] = learning_rate
                norm = float(self.engine.optimizer_step())
        self._divide()
        return (loss.sums, norm) if self.engine.is_mp_src_rank_with_outputs() else None

    def remember(self) -> None:
        """Weights and optimiser, for `undo`."""
        self._kept = Kept(self.engine.module, self.engine.optimizer)

    def undo(self) -> None:
        """They are as they were at `remember`."""
        assert self._kept is not None, "undo follows remember"
        self._kept.put_back()
        self._kept = None

    def forget(self) -> None:
        """`undo` will not follow."""
        self._kept = None

    def write_weights(self, folder: Path) -> None:
        """Rank 0 writes safetensors under the names of Hugging Face; the others give their shards."""
        files: dict[str, str] = {}
        for number, part in enumerate(_parts(self._weights()), 1):
            file = f"model-{number:05d}.safetensors"
            save_file(part, folder / file, {"format": "pt"})
            files.update(dict.fromkeys(part, file))
        if files:
            index = json.dumps({"metadata": {}, "weight_map": files})
            (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")

    def save(self, folder: Path) -> None:
        """This rank's shards of weights and optimiser, and its rng."""
        self.engine.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        """The reverse of `save`."""
        self._divide()
        self.engine.load_checkpoint(str(folder), del_local_after_load=False)

    @property
    def _micro_batch_tokens(self) -> int:
        return self.engine_config.max_token_len_per_gpu

    def _with_defaults(self, data: TensorDict) -> None:
        """What TrainingWorker.train_batch adds to every batch."""
        tensordict_utils.assign_non_tensor(
            data,
            use_remove_padding=self.model_config.use_remove_padding,
            use_fused_kernels=self.engine_config.use_fused_kernels,
        )

    def _divide(self) -> None:
        """After a pass: see `shards`."""
        if isinstance(self.engine.module, torch.nn.Module):
            shards(self.engine.module)

    def _all_finite(self, loss: float) -> bool:
        """The ranks agree, so that all of them step or none."""
        broken = torch.tensor(0 if math.isfinite(loss) else 1, device=get_device_name())
        dist.all_reduce(broken, op=dist.ReduceOp.MAX)
        return not broken.item()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, one after the other, without those that are tied to others; rank 0 alone gets them."""
        named, _ = self.engine.get_per_tensor_param()
        tied: set[str] = set()
        if isinstance(module := self.engine.module, torch.nn.Module):
            own = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
            tied = set(module.state_dict()) - own
        # What the passes see of the weights.
        dtype = getattr(self.engine, "_autocast_dtype", None)
        for name, tensor in named:
            if dist.get_rank() == 0 and name not in tied:
                wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
                yield name, tensor.detach().to("cpu", wanted).contiguous()


def _parts(named: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Some tensors at once: those of one file."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named:
        if part and size + tensor.nbytes > _FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part
