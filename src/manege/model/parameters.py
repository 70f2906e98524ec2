"""Names and shapes of a model's parameters, read off its config.json.

Pure: no weights, no torch, so that a run can be planned on a machine that has neither. Names and shapes are those of
the modules that `transformers` makes of the same config (tests/unit/test_shape.py makes them). What serves other
purposes is left out: the extra layers of Qwen3.5 for predicting several tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from manege.errors import ModelError

__all__ = ["KNOWN", "delta_sizes", "is_mixed", "layer_kinds", "parameter_shapes", "text_config"]

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")
"""Values of `model_type` that are understood; with `_text` at their end, too."""

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]


def parameter_shapes(config: Mapping[str, Any]) -> Mapping[str, Shape]:
    """`config`: a config.json. A tied head has no entry. Raises ModelError for architectures that are not KNOWN."""
    text, vision = text_config(config), config.get("vision_config")
    inside = "model.language_model" if vision else "model"
    width, vocab_size = text["hidden_size"], text["vocab_size"]
    shapes: dict[str, Shape] = {f"{inside}.embed_tokens.weight": (vocab_size, width)}
    for layer, kind in enumerate(layer_kinds(text)):
        shapes |= {f"{inside}.layers.{layer}.{name}": shape for name, shape in _block(text, layer, kind)}
    shapes[f"{inside}.norm.weight"] = (width,)
    if not text.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab_size, width)
    if vision:
        shapes |= {f"model.visual.{name}": shape for name, shape in _vision(vision)}
    return shapes


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part on text, with a `model_type` that is one of KNOWN; whether the head is tied stands outside of it."""
    text = {
        **{key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config},
        **config.get("text_config", config),
    }
    model_type = str(text.get("model_type", "")).removesuffix("_text")
    if model_type not in KNOWN:
        raise ModelError(f"model_type = {model_type!r}: its size is not known here; known are {', '.join(KNOWN)}")
    return {**text, "model_type": model_type}


def layer_kinds(text: Mapping[str, Any]) -> list[str]:
    """`full_attention`, or `linear_attention` with a state of constant size, layer by layer."""
    num_layers = text["num_hidden_layers"]
    if text.get("layer_types"):
        return list(text["layer_types"])
    if not text["model_type"].startswith("qwen3_5"):
        return ["full_attention"] * num_layers
    interval = text.get("full_attention_interval", 4)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]


def is_mixed(text: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts."""
    is_dense = not text["model_type"].endswith("_moe") or layer in (text.get("mlp_only_layers") or ())
    return not is_dense and (layer + 1) % text.get("decoder_sparse_step", 1) == 0


def delta_sizes(text: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of all keys and of all values of a token, in a layer of linear attention."""
    return (
        text["linear_num_key_heads"] * text["linear_key_head_dim"],
        text["linear_num_value_heads"] * text["linear_value_head_dim"],
    )


def _block(text: Mapping[str, Any], layer: int, kind: str) -> Named:
    width = text["hidden_size"]
    yield "input_layernorm.weight", (width,)
    yield "post_attention_layernorm.weight", (width,)
    yield from _delta_net(text) if kind == "linear_attention" else _attention(text)
    yield from _experts(text) if is_mixed(text, layer) else _gated("mlp", text, text["intermediate_size"])


def _linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _attention(text: Mapping[str, Any]) -> Named:
    model_type, width, num_heads = text["model_type"], text["hidden_size"], text["num_attention_heads"]
    head_dim = text.get("head_dim") or width // num_heads
    queries, keys = num_heads * head_dim, (text.get("num_key_value_heads") or num_heads) * head_dim
    # Qwen3.5's queries come with a gate of their size.
    gated = 2 if model_type.startswith("qwen3_5") else 1
    bias = model_type == "qwen2" or text.get("attention_bias", False)
    yield from _linear("self_attn.q_proj", gated * queries, width, bias=bias)
    yield from _linear("self_attn.k_proj", keys, width, bias=bias)
    yield from _linear("self_attn.v_proj", keys, width, bias=bias)
    yield from _linear("self_attn.o_proj", width, queries, bias=bias and model_type != "qwen2")
    if model_type.startswith("qwen3"):
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)


def _gated(name: str, text: Mapping[str, Any], inner: int) -> Named:
    width, bias = text["hidden_size"], text.get("mlp_bias", False)
    yield from _linear(f"{name}.gate_proj", inner, width, bias=bias)
    yield from _linear(f"{name}.up_proj", inner, width, bias=bias)
    yield from _linear(f"{name}.down_proj", width, inner, bias=bias)


def _experts(text: Mapping[str, Any]) -> Named:
    width, inner, num_experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    yield "mlp.gate.weight", (num_experts, width)
    yield "mlp.experts.gate_up_proj", (num_experts, 2 * inner, width)
    yield "mlp.experts.down_proj", (num_experts, width, inner)
    if shared := text.get("shared_expert_intermediate_size"):
        yield from _gated("mlp.shared_expert", text, shared)
        yield "mlp.shared_expert_gate.weight", (1, width)


def _delta_net(text: Mapping[str, Any]) -> Named:
    width, num_heads = text["hidden_size"], text["linear_num_value_heads"]
    keys, values = delta_sizes(text)
    mixed = 2 * keys + values
    yield "linear_attn.dt_bias", (num_heads,)
    yield "linear_attn.A_log", (num_heads,)
    yield "linear_attn.conv1d.weight", (mixed, 1, text["linear_conv_kernel_dim"])
    yield "linear_attn.norm.weight", (text["linear_value_head_dim"],)
    yield from _linear("linear_attn.out_proj", width, values)
    yield from _linear("linear_attn.in_proj_qkv", mixed, width)
    yield from _linear("linear_attn.in_proj_z", values, width)
    yield from _linear("linear_attn.in_proj_b", num_heads, width)
    yield from _linear("linear_attn.in_proj_a", num_heads, width)


def _vision(vision: Mapping[str, Any]) -> Named:
    """The image encoder of Qwen3.5."""
    width, inner, size = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    yield "patch_embed.proj.weight", (width, vision["in_channels"], vision["temporal_patch_size"], size, size)
    yield "patch_embed.proj.bias", (width,)
    yield "pos_embed.weight", (vision["num_position_embeddings"], width)
    for layer in range(vision["depth"]):
        for norm in ("norm1", "norm2"):
            yield f"blocks.{layer}.{norm}.weight", (width,)
            yield f"blocks.{layer}.{norm}.bias", (width,)
        yield from _linear(f"blocks.{layer}.attn.qkv", 3 * width, width, bias=True)
        yield from _linear(f"blocks.{layer}.attn.proj", width, width, bias=True)
        yield from _linear(f"blocks.{layer}.mlp.linear_fc1", inner, width, bias=True)
        yield from _linear(f"blocks.{layer}.mlp.linear_fc2", width, inner, bias=True)
    merged = width * vision["spatial_merge_size"] ** 2
    yield "merger.norm.weight", (width,)
    yield "merger.norm.bias", (width,)
    yield from _linear("merger.linear_fc1", merged, merged, bias=True)
    yield from _linear("merger.linear_fc2", vision["out_hidden_size"], merged, bias=True)
