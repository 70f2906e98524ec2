"""This rank's parts of the weights and of the optimiser: copied, put back, exchanged for those of the reference.

Each rank does it with its own shard, so that nothing is gathered. FSDP2 may leave a module gathered after a forward
pass, with values that a change of the shards would not reach: `shards` divides it again first.
"""

# pyright: reportMissingImports=false
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

__all__ = ["Kept", "exchanged", "shards"]


def shards(module: torch.nn.Module) -> list[Tensor]:
    """The local part of every parameter; a change of them is one of the model."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return [_local(parameter.detach()) for parameter in module.parameters()]


class Kept:
    """Weights and optimiser as they were when it was made, in the machine's memory."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._weights = [_copy(shard) for shard in shards(module)]
        self._state = [
            {key: _copy(value) for key, value in optimizer.state.get(parameter, {}).items()}
            for parameter in module.parameters()
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Both are as before."""
        for shard, old in zip(shards(self._module), self._weights, strict=True):
            shard.copy_(old)
        for parameter, old in zip(self._module.parameters(), self._state, strict=True):
            if not old:
                self._optimizer.state.pop(parameter, None)
                continue
            for key, value in self._optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    _local(value).copy_(old[key])


@contextmanager
@torch.no_grad()
def exchanged(module: torch.nn.Module, others: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the model has other weights; outside, its own again."""
    own = shards(module)
    kept = [shard.clone() for shard in own]
    for shard, other in zip(own, others, strict=True):
        shard.copy_(other)
    try:
        yield
    finally:
        for shard, old in zip(shards(module), kept, strict=True):
            shard.copy_(old)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy(value: Any) -> Any:
    return _local(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else value
