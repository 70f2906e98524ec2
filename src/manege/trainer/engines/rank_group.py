"""The ranks of one machine as each of them sees the others: what they tell each other, and the sum of their tensors.

What is told goes over gloo on the CPU, whatever the model's device: gloo notices at once that a rank has died, and in
time that one hangs. Tensors follow only after all ranks have told something, so none is waited for then. Processes meet
by a file; their sockets are loopback's.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manege.errors import TrainerError

__all__ = ["RankGroup", "RankLostError"]

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class RankLostError(TrainerError):
    """A rank does not answer any more; what it died of is known to whoever started it."""


class RankGroup:
    """One per process, which is one of the ranks. Not safe for concurrent use."""

    def __init__(self, rank: int, num_ranks: int, meeting: Path, *, device: torch.device, timeout_s: float) -> None:
        """Returns when all ranks are here. `meeting`: a file that does not exist yet, the same for all; `device`: of
        the tensors; `timeout_s`: a rank that is waited for longer is lost. Raises RankLostError."""
        self.rank, self.num_ranks = rank, num_ranks
        for name, value in _LOOPBACK.items():
            os.environ.setdefault(name, value)
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise RankLostError(f"rank {rank} of {num_ranks} did not meet the others: {_first_line(error)}") from error

    def told(self, value: Any) -> list[Any]:
        """What each rank tells, by rank. Raises RankLostError."""
        values: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            raise RankLostError(f"rank {self.rank} has lost another one: {_first_line(error)}") from error
        return values

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Each becomes the sum of all ranks', in place, the same to the last bit everywhere. Raises RankLostError."""
        try:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in works:
                assert work is not None
                work.wait()
        except RuntimeError as error:
            raise RankLostError(f"rank {self.rank} has lost another one: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave the others. Safe to repeat."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
