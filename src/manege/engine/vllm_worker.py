"""Runs inside vLLM's workers, in vLLM's environment: a copy of this file is imported there as `--worker-extension-cls`.

On a CPU, vLLM packs the weights of the output head when it loads a model. Where embeddings are tied, no checkpoint has
weights of that name, so that a reload leaves the packed copy as it was: new layers under an old head (vLLM 0.32, seen
by comparing log-probabilities). Here the head computes with the embedding's weights themselves, which a reload does
change.

`--weight-transfer-config '{"backend": "manege"}'` chooses the transfer engine below. It fetches the weights from a
trainer that has nothing of vLLM (`weight_wire`), and vLLM loads them as it loads a checkpoint.

Imports nothing of manege but a copy of `weight_wire`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from manege_weight_wire import Receiver  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

__all__ = ["TransferEngine", "WorkerExtension"]


class WorkerExtension:
    """vLLM wants a class; what counts is that its module is imported before a model is loaded."""


@dataclass
class _Transfer(WeightTransferInitInfo):
    address: str
    """Of the publication."""
    name: str
    """Of this transfer, the same for all workers."""


@dataclass
class _Nothing(WeightTransferUpdateInfo):
    """All of a transfer is one update."""


class TransferEngine(WeightTransferEngine[_Transfer, _Nothing]):
    """`manege` of vLLM's weight-transfer engines; `init`, `start`, `update` and `finish` are called for each transfer.

    `init` raises if the trainer refuses, when no weight has changed yet. An update that fails leaves the layers that
    came before, which its client marks by a version that is older than any.
    """

    init_info_cls = _Transfer
    update_info_cls = _Nothing

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: _Transfer) -> None:
        """Agree with the trainer on a transfer."""
        self.shutdown()
        parallel = self.parallel_config
        # Over data-parallel replicas too.
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        size = 1 + parallel.world_size_across_dp
        self._receiver = Receiver(init_info.address, init_info.name, rank=rank, size=size, device=self.device)

    def start_weight_update(self) -> None:
        """Get the layers ready for a checkpoint's weights."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Returns when the device has them."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: _Nothing) -> None:
        """Load tensor after tensor as it comes."""
        if self._receiver is None:
            raise RuntimeError("weights were to be received before /init_weight_transfer_engine")
        try:
            for weight in self._receiver.tensors():
                self.model.load_weights([weight])
        except BaseException:
            # Without it the model stays half taken apart, and no later update can put it together.
            finalize_layerwise_reload(self.model, self.model_config)
            raise
        finally:
            self.shutdown()

    def finish_weight_update(self) -> None:
        """Put the layers that are left in their places."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the transfer. Safe to repeat."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


WeightTransferEngineFactory.register_engine("manege", TransferEngine)


def _compute_with_the_weights_themselves(_: Any, layer: Any) -> None:
    layer.cpu_linear = torch.nn.functional.linear


if current_platform.is_cpu():
    UnquantizedEmbeddingMethod.process_weights_after_loading = _compute_with_the_weights_themselves
