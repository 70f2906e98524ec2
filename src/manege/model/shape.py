"""How large a model is, read off its config.json: parameters, bytes of cache, sizes of its layers.

Pure arithmetic, without weights and without torch, so that a run can be planned on a machine that has neither. The
counts are those of the modules that `transformers` makes of the same config (tests/unit/test_shape.py makes them).
What only serves other purposes is left out: the extra layers of Qwen3.5 for predicting several tokens.

Shape legend, as in `llama`: H query heads, K key-value heads, D head size, E model width, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from manege.errors import ModelError

__all__ = ["KNOWN", "ModelShape", "shape_of"]

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")
"""Values of `model_type` that are understood; with `_text` at its end, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes, in numbers (not bytes) unless a name says otherwise."""

    model_type: str
    width: int
    """E."""
    num_layers: int
    num_attention_layers: int
    """Those that keep keys and values of every token; the others keep a state of constant size."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_limit: int
    """Tokens that the model was made for."""
    num_parameters: int
    """All, each once: a tied head counts nothing."""
    num_embedding_parameters: int
    """Of the embeddings and of a head of its own."""
    num_block_parameters: int
    """Of the largest layer."""
    num_vision_parameters: int
    """Of the part that sees; it is loaded with the rest."""
    activations_per_token: int
    """Of one layer: what a backward pass needs of its forward pass, for the largest layer."""
    state_per_sequence: int
    """Of all layers with a state of constant size."""

    @property
    def cache_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """`config`: a config.json. Raises ModelError for architectures that are not KNOWN, or a key that is missing."""
    text: Mapping[str, Any] = {
        **{key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config},
        **config.get("text_config", config),
    }
    model_type = str(text.get("model_type", "")).removesuffix("_text")
    if model_type not in KNOWN:
        raise ModelError(f"model_type = {model_type!r}: its size is not known here; known are {', '.join(KNOWN)}")
    try:
        return _shape(model_type, text, config.get("vision_config"))
    except KeyError as error:
        raise ModelError(f"config.json of {model_type} has no key {error}") from error


def _shape(model_type: str, text: Mapping[str, Any], vision: Mapping[str, Any] | None) -> ModelShape:
    width, num_heads, vocab_size = text["hidden_size"], text["num_attention_heads"], text["vocab_size"]
    num_layers = text["num_hidden_layers"]
    num_kv_heads = text.get("num_key_value_heads") or num_heads
    head_dim = text.get("head_dim") or width // num_heads
    kinds = _layer_kinds(model_type, text)
    tied = text.get("tie_word_embeddings", False)
    embeddings = vocab_size * width * (1 if tied else 2)
    sizes = (width, num_heads, num_kv_heads, head_dim)
    blocks, activations = [], []
    for layer, kind in enumerate(kinds):
        is_linear = kind == "linear_attention"
        mixer, kept = _delta_net(text) if is_linear else _attention(model_type, text, *sizes)
        feed, kept_feed = _feed_forward(model_type, text, layer)
        blocks.append(2 * width + mixer + feed)
        # Both norms keep their input and their output.
        activations.append(4 * width + kept + kept_feed)
    num_vision = _vision(vision) if vision else 0
    return ModelShape(
        model_type=model_type,
        width=width,
        num_layers=num_layers,
        num_attention_layers=sum(kind != "linear_attention" for kind in kinds),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_limit=text["max_position_embeddings"],
        num_parameters=embeddings + sum(blocks) + width + num_vision,
        num_embedding_parameters=embeddings,
        num_block_parameters=max(blocks),
        num_vision_parameters=num_vision,
        activations_per_token=max(activations),
        state_per_sequence=sum(_state(text) for kind in kinds if kind == "linear_attention"),
    )


def _layer_kinds(model_type: str, text: Mapping[str, Any]) -> list[str]:
    num_layers = text["num_hidden_layers"]
    if text.get("layer_types"):
        return list(text["layer_types"])
    if not model_type.startswith("qwen3_5"):
        return ["full_attention"] * num_layers
    interval = text.get("full_attention_interval", 4)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]


def _attention(
    model_type: str, text: Mapping[str, Any], width: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int]:
    """Parameters and activations per token."""
    queries, keys = num_heads * head_dim, num_kv_heads * head_dim
    # Qwen3.5's queries come with a gate of their size.
    gated = 2 if model_type.startswith("qwen3_5") else 1
    matrices = width * (gated * queries + 2 * keys) + queries * width
    bias = model_type == "qwen2" or text.get("attention_bias", False)
    biases = (gated * queries + 2 * keys) * bias + width * (bias and model_type != "qwen2")
    normed = model_type.startswith("qwen3")
    norms = 2 * head_dim * normed
    # Queries, keys and values as attention sees them, and before their norms; its output.
    kept = queries + 2 * keys + (queries + keys) * normed + gated * queries
    return matrices + biases + norms, kept


def _feed_forward(model_type: str, text: Mapping[str, Any], layer: int) -> tuple[int, int]:
    """Parameters, and activations per token: gate, its activation, up, and their product."""
    width = text["hidden_size"]
    is_mixed = model_type.endswith("_moe") and layer not in (text.get("mlp_only_layers") or ())
    if not is_mixed or (layer + 1) % text.get("decoder_sparse_step", 1):
        inner = text["intermediate_size"]
        return 3 * width * inner + (2 * inner + width) * text.get("mlp_bias", False), 4 * inner
    inner, num_experts = text["moe_intermediate_size"], text["num_experts"]
    count, kept = width * num_experts + 3 * width * inner * num_experts, 4 * inner * text["num_experts_per_tok"]
    # Each chosen expert has its copy of the input.
    kept += width * text["num_experts_per_tok"]
    if shared := text.get("shared_expert_intermediate_size"):
        return count + 3 * width * shared + width, kept + 4 * shared
    return count, kept


def _delta_net(text: Mapping[str, Any]) -> tuple[int, int]:
    """A layer of gated linear attention (Qwen3.5): parameters and activations per token."""
    width, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys, values, mixed = _delta_sizes(text)
    matrices = width * (mixed + values + 2 * heads) + values * width
    others = mixed * text["linear_conv_kernel_dim"] + 2 * heads + text["linear_value_head_dim"]
    # Before and after the convolution and its activation; the gate and the output, normalised and not.
    return matrices + others, 3 * mixed + 4 * values + 2 * keys


def _delta_sizes(text: Mapping[str, Any]) -> tuple[int, int, int]:
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    return keys, values, 2 * keys + values


def _state(text: Mapping[str, Any]) -> int:
    """One matrix per head, and the last inputs of the convolution."""
    _, values, mixed = _delta_sizes(text)
    return values * text["linear_key_head_dim"] + mixed * (text["linear_conv_kernel_dim"] - 1)


def _vision(vision: Mapping[str, Any]) -> int:
    """The image encoder of Qwen3.5: patches, positions, blocks, and what merges patches to the text's width."""
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    patch = prod((vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"] ** 2))
    norms = 4 * width
    block = norms + 4 * (width * width + width) + 2 * width * inner + inner + width
    merged = width * vision["spatial_merge_size"] ** 2
    merger = 2 * width + merged * merged + merged + merged * vision["out_hidden_size"] + vision["out_hidden_size"]
    return patch * width + width + vision["num_position_embeddings"] * width + vision["depth"] * block + merger
