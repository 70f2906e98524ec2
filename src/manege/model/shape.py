"""How large a model is, read off its config.json: parameters, cache of a token, what a backward pass keeps.

Pure arithmetic over `parameters`.

Shape legend, as in `llama`: H query heads, K key-value heads, D head size, E model width, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from manege.errors import ModelError
from manege.model.parameters import delta_sizes, is_mixed, layer_kinds, parameter_shapes, text_config

__all__ = ["ModelShape", "shape_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Numbers, not bytes."""

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
    parameters: Mapping[str, tuple[int, ...]]
    """Their shapes, by name."""
    activations_per_token: int
    """What a backward pass needs of the forward pass through a layer, in the largest one."""
    state_per_sequence: int
    """Of all layers with a state of constant size."""

    @property
    def num_parameters(self) -> int:
        """All, a tied head once."""
        return sum(map(prod, self.parameters.values()))

    @property
    def num_embedding_parameters(self) -> int:
        """Of the embeddings and of a head of its own."""
        return sum(prod(shape) for name, shape in self.parameters.items() if is_embedding(name))

    @property
    def num_block_parameters(self) -> int:
        """Of the largest layer."""
        blocks: dict[str, int] = {}
        for name, shape in self.parameters.items():
            if ".layers." in name:
                layer = name.split(".layers.")[1].split(".")[0]
                blocks[layer] = blocks.get(layer, 0) + prod(shape)
        return max(blocks.values())

    @property
    def cache_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim

    def num_trained(self, frozen: tuple[str, ...] = ()) -> int:
        """Parameters without those whose name contains one of these."""
        return sum(prod(shape) for name, shape in self.parameters.items() if not any(part in name for part in frozen))

    def num_adapter_parameters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """Of adapters of this rank on the linear layers of these names; none given: on all of the text's layers."""
        return sum(
            rank * (shape[0] + shape[1])
            for name, shape in self.parameters.items()
            if len(shape) == 2 and name.endswith(".weight") and _is_adapted(name.removesuffix(".weight"), targets)
        )


def is_embedding(name: str) -> bool:
    """Whether a parameter is as large as the vocabulary."""
    return name.endswith(("embed_tokens.weight", "lm_head.weight"))


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """`config`: a config.json. Raises ModelError for architectures that are not known, or a key that is missing."""
    text = text_config(config)
    try:
        return _shape(text, parameter_shapes(config))
    except KeyError as error:
        raise ModelError(f"config.json of {text['model_type']} has no key {error}") from error


def _shape(text: Mapping[str, Any], parameters: Mapping[str, tuple[int, ...]]) -> ModelShape:
    width, num_heads, kinds = text["hidden_size"], text["num_attention_heads"], layer_kinds(text)
    return ModelShape(
        model_type=text["model_type"],
        width=width,
        num_layers=len(kinds),
        num_attention_layers=sum(kind != "linear_attention" for kind in kinds),
        num_heads=num_heads,
        num_kv_heads=text.get("num_key_value_heads") or num_heads,
        head_dim=text.get("head_dim") or width // num_heads,
        vocab_size=text["vocab_size"],
        context_limit=text["max_position_embeddings"],
        parameters=parameters,
        activations_per_token=max(_activations(text, layer, kind) for layer, kind in enumerate(kinds)),
        state_per_sequence=sum(_state(text) for kind in kinds if kind == "linear_attention"),
    )


def _is_adapted(name: str, targets: tuple[str, ...]) -> bool:
    layer = name.rpartition(".")[2]
    return ".layers." in name and (layer in targets if targets else layer != "gate")


def _activations(text: Mapping[str, Any], layer: int, kind: str) -> int:
    # Both norms keep their input and their output.
    return 4 * text["hidden_size"] + _of_mixer(text, kind) + _of_feed_forward(text, layer)


def _of_mixer(text: Mapping[str, Any], kind: str) -> int:
    if kind == "linear_attention":
        keys, values = delta_sizes(text)
        # Before and after the convolution and its activation; keys normalised; output and gate, also normalised.
        return 3 * (2 * keys + values) + 2 * keys + 4 * values
    width, num_heads = text["hidden_size"], text["num_attention_heads"]
    head_dim = text.get("head_dim") or width // num_heads
    queries, keys = num_heads * head_dim, (text.get("num_key_value_heads") or num_heads) * head_dim
    kept = 2 * queries + 2 * keys
    if text["model_type"].startswith("qwen3"):
        # Norms of queries and keys.
        kept += queries + keys
    if text["model_type"].startswith("qwen3_5"):
        # The gate, and the output before it.
        kept += 2 * queries
    return kept


def _of_feed_forward(text: Mapping[str, Any], layer: int) -> int:
    """Gate, its activation, up, and their product."""
    if not is_mixed(text, layer):
        return 4 * text["intermediate_size"]
    # Each chosen expert has its copy of the input.
    chosen = text["num_experts_per_tok"] * (4 * text["moe_intermediate_size"] + text["hidden_size"])
    return chosen + 4 * text.get("shared_expert_intermediate_size", 0)


def _state(text: Mapping[str, Any]) -> int:
    """A matrix per head, and the last inputs of the convolution."""
    keys, values = delta_sizes(text)
    return values * text["linear_key_head_dim"] + (2 * keys + values) * (text["linear_conv_kernel_dim"] - 1)
