"""The train engine of one machine's GPUs: data-parallel ranks, of which rank 0 is in this process.

    rank 0 (here)   divides a batch, asks the others, does its own share, saves, exports
    rank 1, 2 ...   a process each (`rank_process`), with a replica of the model and of the optimiser

A batch is divided by whole samples (`algo.division`); each rank's step is that of the whole batch (`rank_engine`). A
rank that dies or hangs ends them all: their weights could not be the same any more, and a run goes on from its last
checkpoint.

To measure on GPUs: tokens/s of `step` on 1, 2, 4, 8 ranks over the same batch, and what `RankGroup.add_up` takes of it
(bytes of the gradients / bandwidth between the GPUs).
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from manege.engine.base import Weights
from manege.errors import ManegeError, TrainerError
from manege.trainer.algo.division import divide
from manege.trainer.algo.samples import Sample
from manege.trainer.engines.base import StepReport, WeightedSample
from manege.trainer.engines.rank_engine import RankEngine
from manege.trainer.engines.rank_group import RankGroup, RankLostError
from manege.trainer.engines.rank_process import RankProcess, first_end
from manege.trainer.objective import Objective
from manege.types import FloatArray

__all__ = ["RanksEngine"]

_SETTLE_S = 10.0
"""For the answers of ranks that live, once one is lost."""


class RanksEngine:
    """See TrainEngine."""

    def __init__(self, own: RankEngine, others: Sequence[RankProcess], group: RankGroup, *, prefix_tree: bool) -> None:
        """`others`: in the order of their ranks, all of them started; they are ended by `close`."""
        self.capabilities = own.capabilities
        self._own, self._others, self._group = own, others, group
        self._prefix_tree = prefix_tree
        self._lost: TrainerError | None = None
        self._asking = threading.Lock()

    def logprobs(self, samples: Sequence[Sample]) -> Sequence[FloatArray]:
        """See TrainEngine."""
        shares = self._shares(samples)
        found = self._all("logprobs", [([samples[index] for index in share],) for share in shares])
        results = [np.empty(0, np.float32)] * len(samples)
        for share, logprobs in zip(shares, found, strict=True):
            for index, logprobs_M in zip(share, logprobs, strict=True):
                results[index] = logprobs_M
        return results

    def step(self, batch: Sequence[WeightedSample], objective: Objective) -> StepReport:
        """See TrainEngine."""
        shares = self._shares([item.sample for item in batch])
        return self._all("step", [([batch[index] for index in share], objective) for share in shares])[0]

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """See TrainEngine."""
        self._others_do("remember")
        try:
            with self._own.undone_on_error():
                yield
        except BaseException:
            with suppress(TrainerError):
                self._others_do("undo")
            raise
        self._others_do("forget")

    def publish(self) -> Weights:
        """See TrainEngine. Raises TrainerError if the ranks have come apart."""
        if len(set(self._all("fingerprint"))) > 1:
            raise self._end(TrainerError("the ranks' weights differ; go on from the last checkpoint with --resume"))
        return self._own.publish()

    def save(self, folder: Path) -> None:
        """See TrainEngine."""
        self._own.save(folder)

    def load(self, folder: Path) -> None:
        """See TrainEngine."""
        self._all("load", [(folder,)] * self._group.num_ranks)

    def export(self, folder: Path) -> None:
        """See TrainEngine."""
        self._own.export(folder)

    def close(self) -> None:
        """End the other ranks, whatever they do. Safe to repeat, and from another thread."""
        for process in self._others:
            process.close()
        # A question that is under way ends now.
        with self._asking:
            self._group.close()

    def _shares(self, samples: Sequence[Sample]) -> Sequence[Sequence[int]]:
        return divide((sample.ids_T for sample in samples), self._group.num_ranks, share=self._prefix_tree)

    def _all(self, name: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """What each rank answers; it gets its own arguments. Raises the first error, and TrainerError for a rank that
        is lost."""
        own, *others = arguments or [()] * self._group.num_ranks
        with self._asking:
            try:
                self._ask(name, others)
                try:
                    result = getattr(self._own, name)(*own)
                except RankLostError:
                    raise
                except Exception:
                    self._answers()  # to be ready for the next question
                    raise
                answers = self._answers()
            except RankLostError as error:
                raise self._end(error) from error
        return [result, *answers]

    def _others_do(self, name: str) -> None:
        with self._asking:
            try:
                self._ask(name, [()] * len(self._others))
                self._answers()
            except RankLostError as error:
                raise self._end(error) from error

    def _ask(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        if self._lost is not None:
            raise self._lost
        for process, given in zip(self._others, arguments, strict=True):
            process.ask(name, *given)

    def _answers(self) -> list[Any]:
        answers = [process.answer() for process in self._others]
        for answer in answers:
            if isinstance(answer, ManegeError):
                raise answer
        return answers

    def _end(self, error: TrainerError) -> TrainerError:
        """The ranks cannot go on; returns what one of them died of, if one did."""
        if isinstance(error, RankLostError):
            for process in self._others:
                with suppress(RankLostError):
                    process.answer(_SETTLE_S)
            error = first_end(self._others) or TrainerError(str(error))
        self._lost = error
        for process in self._others:
            process.kill(str(error))
        return error
