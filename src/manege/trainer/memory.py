"""Memory of one GPU, reckoned from a model's shape before anything starts.

Exact are weights, gradients, what the optimiser keeps, and keys and values of a token: tests compare them with those of
real engines. What a pass needs in between is reckoned by what each layer keeps for its backward pass, and libraries by
a round figure: libraries choose their kernels by themselves. Of verl's strategies, `megatron` is reckoned as it divides
by default: the optimiser's state among the ranks, weights and gradients whole on each.

Shape legend: P parameters, T trained ones, R ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from manege.config import BackendConfig, ModelConfig, RunConfig
from manege.model.shape import ModelShape

__all__ = ["GIB", "Demand", "Room", "engine_room", "longest_sample", "torch_rank", "verl_rank"]

GIB = 1 << 30
LIBRARIES = 3 * GIB // 2
"""CUDA's context, communication buffers and what an allocator cannot use; what a sleeping engine or rank leaves."""
ENGINE_WORK = 4 * GIB
"""Of an engine server: LIBRARIES, CUDA graphs and the activations of its largest batch. It measures that when it
starts."""
SHARES = {"vllm": ("gpu-memory-utilization", 0.92), "sglang": ("mem-fraction-static", 0.85)}
"""The option that says which share of a GPU a server may take, and its default; SGLang's depends on the GPU."""
MOMENTS = 8
"""Bytes of AdamW per parameter: two of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Bytes that a process takes of its GPU."""

    parts: Mapping[str, int]
    state: int
    """Of these, what stays from step to step."""

    @property
    def total(self) -> int:
        """All parts at once."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What an engine server has for sequences on each of its GPUs."""

    weights: int
    """Bytes."""
    taken: int
    """Bytes that it takes in all; it leaves the rest alone."""
    cache: int
    """Bytes for keys, values and states; negative: it cannot start."""
    per_token: int
    per_sequence: int
    """Bytes beside those of its tokens."""

    def num_sequences(self, tokens: int) -> int:
        """Of so many tokens each."""
        return max(0, self.cache) // (self.per_token * tokens + self.per_sequence)


def longest_sample(config: RunConfig, shape: ModelShape) -> int:
    """Tokens; one sample is never divided, so that a micro-batch can be as long as this."""
    return min(filter(None, (config.train.max_sample_tokens, config.model.max_context, shape.context_limit)))


def torch_rank(config: RunConfig, shape: ModelShape, *, on_gpu: bool, serves: bool) -> Demand:
    """Of a process that trains with `torch`: a replica. `serves`: it is an engine, too."""
    train, size = config.train, _dtype_bytes(config.model, on_gpu=on_gpu)
    num_parameters = shape.num_parameters
    if train.lora_rank:
        num_trained, own = shape.num_adapter_parameters(train.lora_rank, tuple(train.lora_targets)), 4
        copies = {"adapters": num_trained * own}
    else:
        num_trained = shape.num_trained(tuple(train.frozen))
        copies = {"float32 copies": 4 * num_trained} if size < 4 else {}
    trained = 4 * num_trained
    kept = {"weights": num_parameters * size, **copies, "optimiser": MOMENTS * num_trained}
    parts = {**kept, "gradients": trained}
    if train.mini_batches > 1:
        parts["undo, of several optimiser steps"] = trained + MOMENTS * num_trained
    if config.credit.kl > 0 and not train.lora_rank:
        parts["reference model"] = num_parameters * size
    parts |= _pass(config, shape, size, checkpointing=train.gradient_checkpointing)
    if serves:
        parts["KV cache"] = config.engine.cache_tokens * shape.cache_per_token * size
    return Demand(parts=parts | ({"libraries, about": LIBRARIES} if on_gpu else {}), state=sum(kept.values()))


def verl_rank(config: RunConfig, shape: ModelShape, *, on_gpu: bool) -> Demand:
    """Of a rank of verl: float32 weights, gradients and moments in R parts, computed on in `model.dtype`."""
    num_ranks, size = config.backend.num_ranks, _dtype_bytes(config.model, on_gpu=on_gpu)
    num_parameters = shape.num_parameters
    if config.backend.strategy == "fsdp2":
        kept = {
            "weights, a part": _share(4 * num_parameters, num_ranks),
            "optimiser, a part": _share(MOMENTS * num_parameters, num_ranks),
        }
        # The embeddings stay, layers come and go two at a time, each with its gradient.
        gathered = 2 * size * (shape.num_embedding_parameters + 2 * shape.num_block_parameters)
        parts = {
            **kept,
            "gradients, a part": _share(4 * num_parameters, num_ranks),
            "gathered layers, about": gathered,
        }
    else:
        kept = {
            "weights": size * num_parameters,
            "optimiser, a part": _share((4 + MOMENTS) * num_parameters, num_ranks),
        }
        parts = {**kept, "gradients": 4 * num_parameters}
    own = config.backend.verl.get("model", {})
    checkpointing = own.get("enable_gradient_checkpointing", config.train.gradient_checkpointing)
    parts |= _pass(config, shape, size, checkpointing=checkpointing)
    return Demand(parts=parts | ({"libraries, about": LIBRARIES} if on_gpu else {}), state=sum(kept.values()))


def engine_room(backend: BackendConfig, model: ModelConfig, shape: ModelShape, gpu_bytes: int) -> Room:
    """On each GPU of an engine server."""
    engines = backend.engines
    options = {key.replace("_", "-"): value for key, value in engines.options.items()}
    key, default = SHARES.get(engines.kind, SHARES["vllm"])
    size = 4 if options.get("dtype") in ("float32", "float") else 2
    cached = 1 if str(options.get("kv-cache-dtype", "")).startswith("fp8") else size
    weights = _share(size * shape.num_parameters, engines.tensor_parallel)
    # Heads are divided; where there are fewer than GPUs, each has one.
    heads = max(1, shape.num_kv_heads // engines.tensor_parallel)
    taken = int(float(options.get(key, default)) * gpu_bytes)
    return Room(
        weights=weights,
        taken=taken,
        cache=taken - weights - ENGINE_WORK,
        per_token=2 * shape.num_attention_layers * heads * shape.head_dim * cached,
        per_sequence=_share(4 * shape.state_per_sequence, engines.tensor_parallel),
    )


def _pass(config: RunConfig, shape: ModelShape, size: int, *, checkpointing: bool) -> dict[str, int]:
    """Of a micro-batch: what the layers keep, and the logits in their own precision, in float32, and their gradient."""
    tokens = max(config.train.micro_batch_tokens, longest_sample(config, shape))
    layers = shape.num_layers * shape.activations_per_token
    if checkpointing:
        # What lies between the layers, and one layer at a time.
        layers = shape.num_layers * shape.width + shape.activations_per_token
    return {
        "activations, about": tokens * layers * size,
        "logits, at most": tokens * shape.vocab_size * (size + 8),
    }


def _dtype_bytes(model: ModelConfig, *, on_gpu: bool) -> int:
    wanted = ("bfloat16" if on_gpu else "float32") if model.dtype == "auto" else model.dtype
    return 2 if wanted == "bfloat16" else 4


def _share(total: int, parts: int) -> int:
    return -(-total // parts)
