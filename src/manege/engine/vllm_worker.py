"""Runs inside vLLM's workers, in vLLM's environment: a copy of this file is imported there as `--worker-extension-cls`.

On a CPU, vLLM packs the weights of the output head when it loads a model. Where embeddings are tied, no checkpoint has
weights of that name, so that a reload leaves the packed copy as it was: new layers under an old head (vLLM 0.32, seen
by comparing log-probabilities). Here the head computes with the embedding's weights themselves, which a reload does
change.

Imports nothing of manege.
"""

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    UnquantizedEmbeddingMethod,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """vLLM wants a class; what counts is that its module is imported before a model is loaded."""


def _compute_with_the_weights_themselves(_: Any, layer: Any) -> None:
    layer.cpu_linear = torch.nn.functional.linear


if current_platform.is_cpu():
    UnquantizedEmbeddingMethod.process_weights_after_loading = _compute_with_the_weights_themselves
