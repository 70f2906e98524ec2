"""The Llama family in plain PyTorch: Llama, SmolLM2, Qwen2, Qwen2.5, Qwen3. Dense, full attention, rotary positions.

In: flat tokens and an `attend`. Out: hidden states and logits, equal to those of `transformers`. Parameters carry
Hugging Face's names, so that a state dict is a checkpoint.

Shape legend: N flat tokens, H query heads, K key-value heads, D head size, E model width, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from torch.utils.checkpoint import checkpoint

from manege.model.base import Attend

__all__ = ["Llama", "can_compute"]


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class _Attention(nn.Module):
    def __init__(self, config: Mapping[str, Any], layer: int) -> None:
        super().__init__()
        width, num_heads, num_kv_heads, self.head_dim = _sizes(config)
        self.layer = layer
        qwen2 = config["model_type"] == "qwen2"
        bias = qwen2 or config.get("attention_bias", False)
        self.q_proj = nn.Linear(width, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, width, bias=bias and not qwen2)
        normed = config["model_type"] == "qwen3"
        self.q_norm = _Norm(self.head_dim, config["rms_norm_eps"]) if normed else nn.Identity()
        self.k_norm = _Norm(self.head_dim, config["rms_norm_eps"]) if normed else nn.Identity()

    def forward(self, x_NE: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, attend: Attend) -> Tensor:
        q_NHD = self.q_norm(self.q_proj(x_NE).unflatten(-1, (-1, self.head_dim)))
        k_NKD = self.k_norm(self.k_proj(x_NE).unflatten(-1, (-1, self.head_dim)))
        v_NKD = self.v_proj(x_NE).unflatten(-1, (-1, self.head_dim))
        q_NHD, k_NKD = _rotate(q_NHD, cos_N1D, sin_N1D), _rotate(k_NKD, cos_N1D, sin_N1D)
        return self.o_proj(attend(self.layer, q_NHD, k_NKD, v_NKD, self.head_dim**-0.5).flatten(-2))


class _Mlp(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner, bias = config["hidden_size"], config["intermediate_size"], config.get("mlp_bias", False)
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x_NE: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x_NE)) * self.up_proj(x_NE))


class _Block(nn.Module):
    def __init__(self, config: Mapping[str, Any], layer: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, layer)
        self.mlp = _Mlp(config)
        self.input_layernorm = _Norm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = _Norm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, x_NE: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, attend: Attend) -> Tensor:
        x_NE = x_NE + self.self_attn(self.input_layernorm(x_NE), cos_N1D, sin_N1D, attend)
        return x_NE + self.mlp(self.post_attention_layernorm(x_NE))


class _Decoder(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(_Block(config, layer) for layer in range(config["num_hidden_layers"]))
        self.norm = _Norm(config["hidden_size"], config["rms_norm_eps"])


class _Module(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = _Decoder(config)
        tied = config.get("tie_word_embeddings", False)
        self.lm_head = None if tied else nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)


class Llama:
    """Implements LanguageModel; made empty by `Llama(config)`, filled by `load.load_model`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        assert can_compute(config)
        self.config = config
        self.num_layers: int = config["num_hidden_layers"]
        _, _, self.num_kv_heads, self.head_dim = _sizes(config)
        self.vocab_size: int = config["vocab_size"]
        self.context_limit: int = config["max_position_embeddings"]
        self._module = _Module(config)
        self.module: nn.Module = self._module
        # Outside the module: not a weight, and kept in float32 whatever the weights are.
        self._frequencies_D = _frequencies(config)
        self._checkpoints = False

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The last hidden state, normalised; (N, E)."""
        decoder = self._module.model
        x_NE = decoder.embed_tokens(ids_N)
        self._frequencies_D = self._frequencies_D.to(ids_N.device)
        angles = (positions_N[:, None].float() * self._frequencies_D)[:, None, :]
        cos_N1D = torch.cat([angles.cos(), angles.cos()], dim=-1).to(x_NE.dtype)
        sin_N1D = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(x_NE.dtype)
        again = self._checkpoints and torch.is_grad_enabled()
        for block in decoder.layers:
            if again:
                x_NE = checkpoint(block, x_NE, cos_N1D, sin_N1D, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x_NE = block(x_NE, cos_N1D, sin_N1D, attend)
        return decoder.norm(x_NE)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """(N, V) in float32."""
        head = self._module.lm_head or self._module.model.embed_tokens
        logits_NV = linear(hidden_NE, head.weight)
        return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))

    def checkpoint_layers(self) -> None:
        """See LanguageModel."""
        self._checkpoints = True


def can_compute(config: Mapping[str, Any]) -> bool:
    """Whether this file computes the model of that config rightly; others go through `transformers`."""
    return (
        config.get("model_type") in ("llama", "qwen2", "qwen3")
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("use_sliding_window", False)
        and _rope(config)["rope_type"] in ("default", "llama3")
    )


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    width, num_heads = config["hidden_size"], config["num_attention_heads"]
    return (
        width,
        num_heads,
        config.get("num_key_value_heads") or num_heads,
        config.get("head_dim") or width // num_heads,
    )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`; before it was `rope_theta` and `rope_scaling` (at first with `type`)."""
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    rope |= config.get("rope_parameters") or {}
    return {"rope_type": rope.get("type", "default"), **rope}


def _frequencies(config: Mapping[str, Any]) -> Tensor:
    rope, head_dim = _rope(config), _sizes(config)[3]
    # On the CPU by name: the model is made on the meta device.
    steps_D = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies_D = 1.0 / rope["rope_theta"] ** (steps_D / head_dim)
    if rope["rope_type"] == "default":
        return frequencies_D
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth_D = ((original * frequencies_D / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - smooth_D) * frequencies_D / factor + smooth_D * frequencies_D


def _rotate(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """(left, right) -> (left cos - right sin, right cos + left sin); the minus is in `sin` already."""
    return torch.addcmul(x_NHD * cos_N1D, x_NHD.roll(x_NHD.shape[-1] // 2, dims=-1), sin_N1D)
