"""The other ranks of a run that trains on several GPUs of this machine: started before the model is loaded here,
watched as long as the run lasts, ended with it, however it ends.

Each loads its replica, serves it as an inference engine on a loopback port, if the run's engines share the trainer's
memory, and trains its share (`rank`).
"""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manege.config import RunConfig
from manege.engine.base import Engine
from manege.engine.shared_upstream import SharedUpstreamEngine
from manege.engine.threads import calm_threads
from manege.errors import ManegeError, TrainerError
from manege.model.folder import ModelFolder
from manege.trainer.engines.base import TrainEngine

__all__ = ["RankOrder", "Ranks", "other_ranks"]

if TYPE_CHECKING:
    from manege.engine.weight_sender import WeightSender
    from manege.model.base import LanguageModel
    from manege.trainer.engines.rank_group import RankGroup
    from manege.trainer.engines.rank_process import RankProcess
    from manege.trainer.engines.ranks import RanksEngine

BEGIN_S = 900.0
"""For a rank's model to be loaded."""
LOOK_S = 0.5
"""Between two looks at the processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """What a rank has to do."""

    config: RunConfig
    rank: int
    meeting: Path
    """A file by which the ranks find each other."""
    serves: bool
    """Its replica is an inference engine, too."""
    verbose: bool


class Ranks:
    """All but rank 0, which is this process."""

    def __init__(self, config: RunConfig, meeting: Path, *, serves: bool) -> None:
        calm_threads()
        from manege.trainer.engines.rank_process import RankProcess

        self._config, self._meeting, self._serves = config, meeting, serves
        self._engine: RanksEngine | None = None
        self._group: RankGroup | None = None
        self.processes: list[RankProcess] = []
        verbose = logging.getLogger("manege").isEnabledFor(logging.DEBUG)
        for rank in range(1, config.backend.num_ranks):
            process = RankProcess(rank, "manege.cli.rank", timeout_s=config.backend.timeout_s)
            self.processes.append(process)
            order = RankOrder(config=config, rank=rank, meeting=meeting, serves=serves, verbose=verbose)
            process.ask("begin", order)

    def join(
        self,
        model: "LanguageModel",
        folder: ModelFolder,
        *,
        reference: bool,
        publish_folder: Path | None,
        sender: "WeightSender | None" = None,
    ) -> tuple[TrainEngine, Mapping[str, Engine]]:
        """The train engine of all ranks, with this process's replica, and the inference engines of the others.
        Blocking, until all of them are here; once. Raises the error of one that could not begin."""
        from manege.trainer.engines.rank_engine import RankEngine
        from manege.trainer.engines.rank_group import RankGroup
        from manege.trainer.engines.ranks import RanksEngine

        config, urls = self._config, {}
        for process in self.processes:
            urls[f"rank {process.rank}"] = _begun(process)
        for process in self.processes:
            process.ask("join")
        group = self._group = RankGroup(
            0,
            config.backend.num_ranks,
            self._meeting,
            device=next(model.module.parameters()).device,
            timeout_s=config.backend.timeout_s,
        )
        own = RankEngine(
            model,
            folder,
            config.train,
            group=group,
            reference=reference,
            publish_folder=publish_folder,
            sender=sender,
        )
        for process in self.processes:
            _begun(process)
        self._engine = RanksEngine(own, self.processes, group, prefix_tree=config.train.prefix_tree)
        engines = {name: SharedUpstreamEngine(url) for name, url in urls.items()} if self._serves else {}
        return self._engine, engines

    @property
    def lost(self) -> TrainerError | None:
        """What one has died of; None: all of them live."""
        from manege.trainer.engines.rank_process import first_end

        return first_end(self.processes)

    async def watch(self) -> None:
        """Raises TrainerError as soon as one has died."""
        while (error := self.lost) is None:
            await asyncio.sleep(LOOK_S)
        raise error

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            process.close()
        if self._engine is not None:
            self._engine.close()
        elif self._group is not None:
            self._group.close()


def _begun(process: "RankProcess") -> Any:
    answer = process.answer(BEGIN_S)
    if isinstance(answer, ManegeError):
        raise TrainerError(f"rank {process.rank} could not begin: {answer}") from answer
    return answer


@asynccontextmanager
async def other_ranks(config: RunConfig, *, serves: bool) -> AsyncIterator[Ranks | None]:
    """None: the run has one rank. Raises TrainerError when one of them dies. `serves`: they are inference engines."""
    if config.backend.kind != "torch" or config.backend.num_ranks == 1:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="manege-ranks-") as folder:
        ranks = Ranks(config, Path(folder) / "meeting", serves=serves)
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(ranks.watch(), name="ranks")
                yield ranks
                watching.cancel()
        except* ManegeError as errors:
            # Whoever asks a rank that has died fails before it is looked at.
            raise ranks.lost or errors.exceptions[0] from None
        finally:
            await asyncio.to_thread(ranks.close)
