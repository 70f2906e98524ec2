"""The train engine over verl's training workers: the loop, the schedule and the credit are ours, what is distributed is
verl's.

    driver (here)    divides a batch by whole samples, one share per data-parallel rank; adds up what the ranks say
    ranks            `worker`: a pass and a step of verl's engine with our loss; shards, checkpoints and exports

One call is one optimiser step on all that it is given: verl divides nothing into mini-batches of its own. Folders are
written by the ranks, so that several machines need one file system.
"""

# pyright: reportMissingImports=false
import functools
import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from manege.config import RunConfig
from manege.engine.base import Weights
from manege.errors import TrainerError
from manege.model.folder import ModelFolder
from manege.model.load import exported_folder
from manege.trainer.algo.division import divide
from manege.trainer.algo.samples import Sample
from manege.trainer.engines.base import Capabilities, StepReport, WeightedSample
from manege.trainer.engines.verl.ranks import Ranks, started_ranks
from manege.trainer.engines.verl.settings import worker_config
from manege.trainer.objective import Objective
from manege.types import FloatArray

__all__ = ["VerlEngine", "started_verl_engine"]

_LOSSES = frozenset({"ppo", "cispo", "gspo"})
_STATE_FILE = "verl.json"
_SHARDS = "shards"


class VerlEngine:
    """See TrainEngine."""

    def __init__(
        self, ranks: Ranks, config: RunConfig, folder: ModelFolder, *, base_rate: float, reference: bool
    ) -> None:
        """`base_rate`: the learning rate after the warm-up."""
        self.capabilities = Capabilities(
            prefix_tree=False,
            max_sample_tokens=folder.context_limit,
            losses=_LOSSES,
            reference=reference,
            publishes="folder",
        )
        self._ranks, self._config, self._folder, self._base_rate = ranks, config.train, folder, base_rate
        self._publish_folder = config.run_folder / "weights"
        self._num_steps = 0

    def logprobs(self, samples: Sequence[Sample]) -> Sequence[FloatArray]:
        """See TrainEngine."""
        shares = self._shares(samples)
        rows = [[samples[index] for index in share] for share in shares]
        found = self._ranks.answers("logprobs", _longest(shares), shares=rows)
        results = [np.empty(0, np.float32)] * len(samples)
        for share, logprobs in zip(shares, found, strict=True):
            for index, logprobs_M in zip(share, logprobs, strict=True):
                results[index] = logprobs_M
        return results

    def step(self, batch: Sequence[WeightedSample], objective: Objective) -> StepReport:
        """See TrainEngine."""
        if objective.kl > 0 and not self.capabilities.reference:
            raise TrainerError("credit.kl > 0 needs the model that the run began with; this engine kept no copy of it")
        rate = self._base_rate * min(1.0, (self._num_steps + 1) / (self._config.warmup_steps + 1))
        shares = self._shares([item.sample for item in batch])
        rows = [[batch[index] for index in share] for share in shares]
        found = self._ranks.answers("step", _longest(shares), objective, rate, shares=rows)
        sums, norm = functools.reduce(operator.add, (own for own, _ in found)), found[0][1]
        if not (math.isfinite(norm) and math.isfinite(sums.loss)):
            raise TrainerError(
                f"loss {sums.loss} or gradient norm {norm} is not finite; weights are unchanged. "
                "Lower train.learning_rate or look for broken log-probabilities"
            )
        self._num_steps += 1
        return sums.report(grad_norm=norm, learning_rate=rate)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """See TrainEngine. The ranks hold copies of their shards meanwhile, in their machines' memory."""
        num_steps = self._num_steps
        self._ranks.call("remember")
        try:
            yield
        except BaseException:
            self._num_steps = num_steps
            self._ranks.call("undo")
            raise
        self._ranks.call("forget")

    def publish(self) -> Weights:
        """See TrainEngine."""
        # Two names take turns, so that an engine that is slow to read never sees a folder half written.
        folder = self._publish_folder / str(self._num_steps % 2)
        self.export(folder)
        return Weights(kind="folder", folder=str(folder))

    def save(self, folder: Path) -> None:
        """See TrainEngine. The number of ranks is part of it: each reads its own shards."""
        self.export(folder)
        self._ranks.call("save", (folder / _SHARDS).absolute())
        state = {"num_steps": self._num_steps, **self._shape}
        (folder / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """See TrainEngine."""
        try:
            state = json.loads((folder / _STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrainerError(f"{folder} is not a checkpoint of this engine: {error}") from error
        for name, own in self._shape.items():
            if state.get(name) != own:
                raise TrainerError(
                    f"checkpoint {folder} has {name} = {state.get(name)}, this run {own}; resume with the model and "
                    "the ranks that it was made with, or start a new run from it with model.path"
                )
        self._ranks.call("load", (folder / _SHARDS).absolute())
        self._num_steps = state["num_steps"]

    def export(self, folder: Path) -> None:
        """See TrainEngine."""
        with exported_folder(self._folder, folder) as unfinished:
            self._ranks.call("write_weights", unfinished.absolute())

    @property
    def _shape(self) -> dict[str, int]:
        return {"num_parameters": self._ranks.places[0].num_parameters, "num_ranks": len(self._ranks.places)}

    def _shares(self, samples: Sequence[Sample]) -> Sequence[Sequence[int]]:
        return divide((sample.ids_T for sample in samples), self._ranks.num_shares, share=False)


@contextmanager
def started_verl_engine(
    config: RunConfig, folder: ModelFolder, environment: Mapping[str, str], *, cpu: bool
) -> Iterator[VerlEngine]:
    """In a Ray that is there; its ranks are gone afterwards. Raises ConfigError for keys of `backend.verl`,
    TrainerError for what the cluster does not have."""
    settings = worker_config(config, folder, cpu=cpu)
    reference = config.credit.kl > 0
    if reference and config.backend.strategy == "megatron":
        raise TrainerError(f"credit.kl = {config.credit.kl}: no reference is kept under megatron; set it to 0")
    with started_ranks(config.backend, settings, environment, keep_reference=reference) as ranks:
        yield VerlEngine(ranks, config, folder, base_rate=settings.optimizer_config.lr, reference=reference)


def _longest(shares: Sequence[Sequence[int]]) -> int:
    """Rows of every rank; at least one, since a rank cannot sit out a collective."""
    return max(1, *map(len, shares))
