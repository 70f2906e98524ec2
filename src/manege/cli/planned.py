"""What is known of a run before anything starts: its settings, the shape of its model, the machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manege.cli.machine import Machine
from manege.config import RunConfig
from manege.engine.commands import server_gpus
from manege.model.shape import ModelShape
from manege.trainer.memory import Demand, torch_rank, verl_rank

__all__ = ["Planned", "engine_gpus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """See above."""

    config: RunConfig
    folder: Path
    """The model's, where a run would find it."""
    shape: ModelShape
    machine: Machine
    gateway_url: str | None
    """Of a gateway elsewhere."""
    num_tasks: int | None
    """None: unknown."""

    @property
    def on_gpu(self) -> bool:
        """Whether the model is computed on GPUs."""
        return self.config.model.device != "cpu" and self.machine.num_gpus > 0

    @property
    def rank(self) -> Demand:
        """Of one process that trains."""
        if self.config.backend.kind == "verl":
            return verl_rank(self.config, self.shape, on_gpu=self.on_gpu)
        return torch_rank(self.config, self.shape, on_gpu=self.on_gpu, serves=self.ranks_serve)

    @property
    def ranks_serve(self) -> bool:
        """Whether the processes that train are the engines, too."""
        backend, elsewhere = self.config.backend, self.gateway_url or self.config.gateway.engine_url
        return backend.kind == "torch" and not (backend.engines.count or elsewhere)


def engine_gpus(planned: Planned) -> Sequence[range]:
    """Of each engine server, on the first machine."""
    backend = planned.config.backend
    return [server_gpus(backend, planned.config.model, index) for index in range(backend.engines.count)]
