"""What a trainer and the workers of an engine server say to each other when weights pass between their memories.

The trainer has a store, a process group is made for each transfer, and every tensor is one broadcast of its bytes.

    worker 1   request/K     {name, publication, size, device}, K counted up; `name` is made up for the transfer
    trainer    NAME/answer   {backend, tensors: [[name, dtype, shape], ...]} or {refused}
    all        a group NAME: the trainer is rank 0, the workers are the others; the tensors, in that order
    worker R   NAME/done/R   "all", or "left" when it leaves in the middle

Between GPUs the group is NCCL's, else gloo's; the order is the same. Whatever is waited for longer than PATIENCE_S is
not coming, which is a RuntimeError, as is a side that has gone.

Imports nothing of manege: vLLM's workers import a copy of this file, in vLLM's environment.
"""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import (
    BroadcastOptions,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

__all__ = ["Group", "Receiver", "connect", "request"]

PATIENCE_S = 60.0
"""Of one side with the other, for an answer or a tensor; the largest tensors take seconds."""
_LOOK_S = 0.0005
"""Between two looks at a broadcast under way."""


def connect(host: str, port: int, *, timeout_s: float = PATIENCE_S) -> TCPStore:
    """A client of the trainer's store; one for each thread."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def request(store: Store, body: Any) -> None:
    """Ask the trainer for a transfer; None: to stop."""
    store.set(f"request/{store.add('requests', 1)}", json.dumps(body))


class Group:
    """Of the trainer and the workers of one server, for one transfer. Blocking until all are there."""

    def __init__(self, store: Store, name: str, *, host: str, rank: int, size: int, backend: str) -> None:
        store = PrefixStore(name, store)
        self._group: Any
        if backend == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            # Its own watchdog would end the process; `broadcast` looks at the time itself.
            options._timeout = timedelta(seconds=10 * PATIENCE_S)
            self._group = ProcessGroupNCCL(store, rank, size, options)
        else:
            options = cast(Any, ProcessGroupGloo)._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=PATIENCE_S)
            self._group = ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, bytes_N: Tensor) -> None:
        """From the trainer to all others, in place. Raises RuntimeError when one of them is gone."""
        work = self._group.broadcast([bytes_N], BroadcastOptions())
        until_s = time.monotonic() + PATIENCE_S
        while not work.is_completed():
            if time.monotonic() > until_s:
                self._group.abort()
                raise RuntimeError(f"a tensor of {bytes_N.numel()} bytes did not pass within {PATIENCE_S:g} s")
            time.sleep(_LOOK_S)
        work.wait()

    def close(self) -> None:
        """Leave it, also in the middle."""
        self._group.abort()


class Receiver:
    """One worker's side of a transfer; the weights are promised once it is made."""

    def __init__(self, address: str, name: str, *, rank: int, size: int, device: torch.device) -> None:
        """`address`: of the publication, HOST:PORT/NUMBER; `rank`: from 1; `size`: of all workers and the trainer.
        Raises RuntimeError when the trainer is gone, does not answer or refuses."""
        place, _, publication = address.partition("/")
        host, _, port = place.rpartition(":")
        self._store, self._name, self._rank = connect(host, int(port)), name, rank
        if rank == 1:
            asked = {"name": name, "publication": int(publication), "size": size, "device": device.type}
            request(self._store, asked)
        try:
            answer = json.loads(self._store.get(f"{name}/answer"))
        except RuntimeError as error:
            raise RuntimeError(f"the trainer at {place} did not answer within {PATIENCE_S:g} s: {error}") from error
        if refused := answer.get("refused"):
            raise RuntimeError(f"the trainer refuses to send its weights: {refused}")
        self._tensors, backend = answer["tensors"], answer["backend"]
        self._device = device if backend == "nccl" else torch.device("cpu")
        self._group = Group(self._store, name, host=host, rank=rank, size=size, backend=backend)
        self._is_done = False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """By their names in a checkpoint, as they come."""
        for name, dtype_name, shape in self._tensors:
            dtype: torch.dtype = getattr(torch, dtype_name)
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._group.broadcast(tensor.view(-1).view(torch.uint8))
            yield name, tensor
        self._tell("all")

    def close(self) -> None:
        """Leave, also in the middle."""
        with suppress(RuntimeError):
            self._tell("left")
        self._group.close()

    def _tell(self, what: str) -> None:
        if not self._is_done:
            self._store.set(f"{self._name}/done/{self._rank}", what)
            self._is_done = True
