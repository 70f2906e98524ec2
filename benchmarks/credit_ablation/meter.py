"""The gradient of a batch, as the real `TorchEngine.step` computes it, without moving the weights.

A hook reads each parameter's gradient as it accumulates; the step itself is taken at a learning rate that no float32
weight can feel. Batches that are put together count alike, so a reading is the mean of their gradients.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from manege.config import CreditConfig, TrainConfig
from manege.model.base import LanguageModel
from manege.model.folder import ModelFolder
from manege.trainer.engines.base import WeightedSample
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of

__all__ = ["Gradient", "Meter"]

Gradient = npt.NDArray[np.float32]
_STILL = 1e-30


class Meter:
    """Reads gradients at the present weights of a model."""

    def __init__(self, model: LanguageModel, folder: ModelFolder) -> None:
        train = TrainConfig(learning_rate=_STILL, warmup_steps=0, micro_batch_tokens=4096)
        self._engine = TorchEngine(model, folder, train)
        self._names = [name for name, _ in model.module.named_parameters()]
        self._seen: dict[str, Tensor] = {}
        for name, parameter in model.module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda tensor, name=name: self._see(name, tensor))

    def read(self, batches: Sequence[Sequence[WeightedSample]], credit: CreditConfig) -> Gradient:
        """(P,) over all parameters. Raises ValueError when no sample has an advantage."""
        share = 1 / len(batches)
        samples = [dataclasses.replace(item, weight=item.weight * share) for batch in batches for item in batch]
        if not samples:
            raise ValueError("no batch has a gradient: all rewards of each group are equal")
        self._engine.step(samples, objective_of(credit))
        return np.concatenate([self._seen[name].numpy().ravel() for name in self._names])

    def _see(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._seen[name] = parameter.grad.detach().clone()
