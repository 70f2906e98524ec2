"""Gives a trainer's weights to engine servers, from memory to memory (`weight_wire`).

In: the weights of each publication, which are copied into this machine's memory, so that training goes on while they
are fetched. Out: an address where a server's workers fetch them, as often as they like: a server that was restarted
asks again. The weights before are kept until somebody has the new ones, since until then they are those in service.

Concurrency: a thread waits for requests and starts one for each; `publish` and `close` are called from any.
"""

import itertools
import json
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from manege.engine.base import Weights
from manege.engine.weight_wire import Group, connect, request
from manege.logs import get_logger, kv

__all__ = ["WeightSender"]

HOST = "127.0.0.1"
"""The store has no key: whoever reaches it can read the weights."""
_FOREVER_S = 10 * 365 * 24 * 3600.0

_log = get_logger("engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Publication:
    number: int
    tensors: dict[str, Tensor]
    """In this machine's memory."""
    device: torch.device
    """Of the trainer, whose GPU sends."""


class WeightSender:
    """Of one train engine."""

    def __init__(self) -> None:
        listening = socket.create_server((HOST, 0))
        self._port = listening.getsockname()[1]
        fd = listening.detach()
        self._store: TCPStore | None = TCPStore(
            HOST, self._port, is_master=True, wait_for_workers=False, master_listen_fd=fd
        )
        """Serves as long as it is held."""
        self._kept: dict[int, _Publication] = {}
        self._lock = threading.Lock()
        """Of `_kept`."""
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._serve, name="weight-sender", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def publish(self, weights: Iterable[tuple[str, Tensor]]) -> Weights:
        """Copy the weights, named as in a checkpoint; where they can be fetched from now on."""
        device, tensors = torch.device("cpu"), {}
        for name, tensor in weights:
            device = tensor.device
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        number = next(self._numbers)
        with self._lock:
            self._kept[number] = _Publication(number=number, tensors=tensors, device=device)
        return Weights(kind="transfer", address=f"{HOST}:{self._port}/{number}")

    def close(self) -> None:
        """Give out no more. Safe to repeat."""
        if self._store is not None:
            request(self._store, None)
            self._thread.join()
            self._store = None

    def _serve(self) -> None:
        store = connect(HOST, self._port, timeout_s=_FOREVER_S)
        for number in itertools.count(1):
            key = f"request/{number}"
            asked = json.loads(store.get(key))
            store.delete_key(key)
            if asked is None:
                return
            threading.Thread(target=self._answer, args=(asked,), name=f"weight-sender-{number}", daemon=True).start()

    def _answer(self, asked: dict[str, Any]) -> None:
        with self._lock:
            kept = self._kept.get(asked["publication"])
            last = max(self._kept, default=0)
        try:
            store = connect(HOST, self._port)
            if kept is None:
                refused = f"publication {asked['publication']} is gone, the last one is {last}"
                store.set(f"{asked['name']}/answer", json.dumps({"refused": refused}))
                return
            self._send(store, kept, asked)
        except RuntimeError as error:
            _log.warning(kv("weights did not reach an engine server", publication=asked["publication"], reason=error))
            return
        with self._lock:
            self._kept = {number: each for number, each in self._kept.items() if number >= kept.number}

    def _send(self, store: TCPStore, kept: _Publication, asked: dict[str, Any]) -> None:
        """Returns when all workers have said that they have them."""
        name, size, device = asked["name"], asked["size"], asked["device"]
        backend = "nccl" if device == kept.device.type == "cuda" else "gloo"
        told = [[key, str(each.dtype).removeprefix("torch."), list(each.shape)] for key, each in kept.tensors.items()]
        store.set(f"{name}/answer", json.dumps({"backend": backend, "tensors": told}))
        group = Group(store, name, host=HOST, rank=0, size=size, backend=backend)
        done = [f"{name}/done/{rank}" for rank in range(1, size)]
        try:
            for tensor in kept.tensors.values():
                staged = tensor.to(kept.device) if backend == "nccl" else tensor
                group.broadcast(staged.view(-1).view(torch.uint8))
            store.wait(done)
            if any(store.get(key) != b"all" for key in done):
                raise RuntimeError("a worker could not use them; see the server's log")
        finally:
            group.close()
            with suppress(RuntimeError):
                for key in (f"{name}/answer", *done):
                    store.delete_key(key)
