"""Sizes read off a config.json are those of the modules made of it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from manege.engine.kv_cache import KvCache
from manege.errors import ModelError
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.llama import Llama
from manege.model.load import load_model
from manege.model.shape import shape_of

ROOT = Path(__file__).parents[2]
TINY = open_folder(str(ROOT / "tests" / "tiny" / "model"))
RECIPES = ROOT / "src" / "manege" / "recipes"

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
VISION = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_heads": 4,
    "num_position_embeddings": 64,
    "out_hidden_size": 96,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
CONFIGS = {
    "llama": {"model_type": "llama", **SMALL},
    "llama, tied and with biases": {
        "model_type": "llama",
        **SMALL,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"model_type": "mistral", **SMALL, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **{key: value for key, value in SMALL.items() if key != "head_dim"}},
    "qwen3": {"model_type": "qwen3", **SMALL},
    "qwen3_moe": {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 2},
    "qwen3_5_text": {"model_type": "qwen3_5_text", **SMALL, **DELTA, "full_attention_interval": 2},
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text", **SMALL, **DELTA},
        "vision_config": {"model_type": "qwen3_5", **VISION},
    },
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        **SMALL,
        **DELTA,
        **EXPERTS,
        "shared_expert_intermediate_size": 24,
    },
    **{f"paper, {path.stem}": json.loads(path.read_text()) for path in sorted(RECIPES.glob("*/*.json"))},
}


def made(config):
    """The module that transformers makes of it, without memory."""
    known = AutoConfig.for_model(**config)
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(known)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_parameters_are_those_that_transformers_makes(config):
    shape, module = shape_of(config), made(config)
    assert shape.parameters == {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    layers = module.get_decoder().layers
    assert shape.num_block_parameters == max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    matrices = {module.get_input_embeddings().weight, module.get_output_embeddings().weight}
    assert shape.num_embedding_parameters == sum(weight.numel() for weight in matrices)


def test_parameters_are_those_of_our_own_model():
    with torch.device("meta"):
        model = Llama(TINY.config)
    shape = shape_of(TINY.config)
    assert shape.parameters == {name: tuple(p.shape) for name, p in model.module.named_parameters()}
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
    )
    assert shape.context_limit == TINY.context_limit


def test_the_cache_of_a_token_is_that_of_the_local_engine():
    model = load_model(TINY)
    cache = KvCache(model, 4096)
    cache.grow(512)
    num_tokens = cache.pool_RL2TKD.shape[0] * cache.pool_RL2TKD.shape[3]
    assert cache.pool_RL2TKD.nbytes == num_tokens * shape_of(TINY.config).cache_per_token * 4


@pytest.mark.parametrize("num_tokens", [64, 256])
def test_what_a_backward_pass_keeps_is_about_what_is_reckoned(num_tokens):
    model = load_model(TINY)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.module.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    ids_N = torch.arange(num_tokens) % 256
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden(ids_N, torch.arange(num_tokens), causal_attend([num_tokens])).sum()
    num_bytes = sum(size for _, size in kept.values())
    shape = shape_of(TINY.config)
    reckoned = 4 * num_tokens * shape.num_layers * shape.activations_per_token
    assert 0.75 * num_bytes < reckoned < 1.25 * num_bytes


def test_the_state_of_linear_attention_is_that_of_transformers():
    config = CONFIGS["qwen3_5_text"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        cache = model(torch.arange(6)[None], use_cache=True).past_key_values
    states = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    num_kept = sum(part.numel() for layer in states for part in (layer.recurrent_states[0], layer.conv_states[0]))
    # transformers keeps one input of the convolution more than is needed.
    mixed = 2 * 2 * 8 + 4 * 16
    assert num_kept == shape_of(config).state_per_sequence + len(states) * mixed


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(ModelError, match=r"'gemma3'.*llama"):
        shape_of({"model_type": "gemma3"})


def test_a_config_without_a_needed_key_is_refused_by_its_name():
    with pytest.raises(ModelError, match="max_position_embeddings"):
        shape_of({key: value for key, value in CONFIGS["llama"].items() if key != "max_position_embeddings"})
