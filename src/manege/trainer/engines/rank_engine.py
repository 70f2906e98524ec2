"""The torch engine as one of several data-parallel ranks: each has a replica of the model and a share of the batch.

The loss is a sum over samples, so that the sum of the ranks' gradients is that of the batch. Every rank then clips and
steps by it alike, and the replicas stay the same. A rank without a sample takes part with nothing; one that fails tells
the others instead of its sums, and all of them stop before the weights change.
"""

import functools
import operator
from collections.abc import Sequence
from pathlib import Path

import torch

from manege.config import TrainConfig
from manege.engine.threads import physical_cores
from manege.engine.weight_sender import WeightSender
from manege.errors import ManegeError, TrainerError
from manege.logs import get_logger
from manege.model.base import LanguageModel
from manege.model.folder import ModelFolder
from manege.trainer.engines.base import WeightedSample
from manege.trainer.engines.rank_group import RankGroup
from manege.trainer.engines.step_sums import StepSums
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import Objective

__all__ = ["RankEngine"]

_log = get_logger("trainer")


class RankEngine(TorchEngine):
    """See TrainEngine; `step` is called on all ranks at once, each with its share."""

    def __init__(
        self,
        model: LanguageModel,
        folder: ModelFolder,
        config: TrainConfig,
        *,
        group: RankGroup,
        reference: bool = False,
        publish_folder: Path | None = None,
        sender: WeightSender | None = None,
    ) -> None:
        super().__init__(model, folder, config, reference=reference, publish_folder=publish_folder, sender=sender)
        self._group = group

    def accumulate(self, batch: Sequence[WeightedSample], objective: Objective) -> StepSums:
        """The gradient and the sums of all ranks. Raises TrainerError on all of them if one fails."""
        # The ranks share this machine's cores.
        torch.set_num_threads(max(1, physical_cores() // self._group.num_ranks))
        try:
            own = super().accumulate(batch, objective)
        except Exception as error:  # whatever it is, the others wait for this rank
            if not isinstance(error, ManegeError):
                _log.exception("a rank failed")
            told = self._group.told(f"rank {self._group.rank} failed: {_told(error)}")
        else:
            told = self._group.told(own)
        if failures := [each for each in told if isinstance(each, str)]:
            raise TrainerError(f"{failures[0]}; weights are unchanged")
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._group.add_up(parameter.grad for parameter in self._parameters if parameter.grad is not None)
        return functools.reduce(operator.add, told)

    def fingerprint(self) -> int:
        """The same for the same weights, to the last bit."""
        halves = [parameter.detach().flatten().view(torch.int16) for parameter in self._parameters]
        return sum(int(half.sum(dtype=torch.int64)) * place for place, half in enumerate(halves, 1))


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ManegeError) else f"{type(error).__name__}: {error}"
