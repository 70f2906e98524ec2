"""The one interface between model code and those who run it: the local engine and the torch train engine.

Tokens of many sequences are laid out flat: N tokens, each with its position in its own sequence. The model computes
everything but attention; who runs it passes `attend`, which knows which earlier keys a token may see (a KV cache, a
causal block, a prefix tree). So one forward serves continuous batching and prefix-tree training alike.

Shape legend: N flat tokens, H query heads, K key-value heads, D head size, E model width, V vocabulary.
"""

from typing import Protocol

from torch import Tensor, nn

__all__ = ["Attend", "LanguageModel"]


class Attend(Protocol):
    """Attention of one layer over what the caller lets each token see."""

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        """Rotary position is already applied; returns (N, H, D)."""
        ...


class LanguageModel(Protocol):
    """Implementations: Llama (ours: Llama, SmolLM2, Qwen2.5, Qwen3) and foreign (`transformers`)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_limit: int
    module: nn.Module
    """Holds the parameters, under Hugging Face's names."""

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The last hidden state, normalised, ready for `logits`; (N, E)."""
        ...

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """(N, V) in float32."""
        ...

    def checkpoint_layers(self) -> None:
        """From now on `hidden` keeps only what lies between the layers for a backward pass, which computes them
        again."""
        ...
