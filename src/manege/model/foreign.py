"""Any other full-attention architecture, through `transformers` behind the same interface.

The model's own code runs; only its attention function is ours: it hands queries, keys and values to the `attend` of
the caller. What the architecture does around that (windows, soft caps, sinks, scaled logits) could be lost silently, so
loading ends with a proof on a few tokens: our path must give the logits of the model's own eager attention.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from manege.errors import ModelError
from manege.model.attend import causal_attend
from manege.model.base import Attend
from manege.model.folder import ModelFolder

__all__ = ["Foreign", "load_foreign"]

_NAME = "manege"
_ATTEND: ContextVar[Attend] = ContextVar("attend")
"""Set during a forward pass: the one way to reach the attention function through any architecture's signature."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    # (1, heads, N, D) in, (1, N, heads, D) out, as transformers wants it.
    q_NHD, k_NKD, v_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    return _ATTEND.get()(layer, q_NHD, k_NKD, v_NKD, scaling)[None], None


class Foreign:
    """Implements LanguageModel around a causal model of `transformers`."""

    def __init__(self, module: Any, context_limit: int) -> None:
        config = module.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        # Configs lie about these (a key that the architecture ignores); the proof measures them.
        self.num_kv_heads = self.head_dim = 0
        self.vocab_size: int = config.vocab_size
        self.context_limit = context_limit
        self.module: nn.Module = module
        self._decoder, self._head = module.base_model, module.get_output_embeddings()

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The last hidden state, normalised; (N, E)."""
        token = _ATTEND.set(attend)
        try:
            output = self._decoder(input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False)
        finally:
            _ATTEND.reset(token)
        return output.last_hidden_state[0]

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """(N, V) in float32."""
        logits_NV = self._head(hidden_NE)
        return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))

    def checkpoint_layers(self) -> None:
        """See LanguageModel. Raises ModelError for an architecture that does not name its layers."""
        layers = [layer for layer in self._decoder.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not layers:
            raise ModelError(
                f"{type(self.module).__name__} of transformers {transformers.__version__} does not say what its layers "
                "are; set train.gradient_checkpointing = false"
            )
        for layer in layers:
            layer.forward = _computed_again(layer.forward)


def _computed_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward pass under a checkpoint. Its second time is in a thread of the backward pass, to which the
    context of the first must be carried."""

    def forward_once(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        attend = _ATTEND.get()

        def with_context(*arguments: Any, **options: Any) -> Any:
            token = _ATTEND.set(attend)
            try:
                return forward(*arguments, **options)
            finally:
                _ATTEND.reset(token)

        return checkpoint(with_context, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

    return forward_once


def load_foreign(folder: ModelFolder, device: str | torch.device, dtype: torch.dtype) -> Foreign:
    """Raises ModelError for an architecture that is unknown, or that our attention cannot compute."""
    _refuse_windows(folder)
    AttentionInterface.register(_NAME, _attention)
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(folder.path, dtype=dtype, attn_implementation=_NAME)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{folder.path}: transformers {transformers.__version__} cannot load this model: {reason}"
        ) from error
    model = Foreign(module.to(device).eval(), folder.context_limit)
    _prove(model, folder)
    return model


def _refuse_windows(folder: ModelFolder) -> None:
    config: Mapping[str, Any] = folder.config.get("text_config", folder.config)
    kinds = config.get("layer_types") or ()
    window = config.get("sliding_window") if config.get("use_sliding_window", not kinds) else None
    windowed = sorted(set(kinds) - {"full_attention"})
    if windowed or window:
        what = f"layers of type {', '.join(windowed)}" if windowed else f"a sliding window of {window} tokens"
        raise ModelError(
            f"{folder.path}: {config.get('model_type')} has {what}; only full attention can be sampled and trained here"
        )


def _prove(model: Foreign, folder: ModelFolder) -> None:
    ids_N = torch.arange(8, device=next(model.module.parameters()).device) % model.vocab_size
    module: Any = model.module

    def attend(layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        if k_NKD.shape != v_NKD.shape:
            raise ModelError(f"{folder.path}: keys of shape {list(k_NKD.shape)} but values of {list(v_NKD.shape)}")
        _, model.num_kv_heads, model.head_dim = k_NKD.shape
        return causal_attend([8])(layer, q_NHD, k_NKD, v_NKD, scale)

    with torch.inference_mode():
        ours_NV = model.logits(model.hidden(ids_N, torch.arange(8, device=ids_N.device), attend))
        module.set_attn_implementation("eager")
        theirs_NV = module(ids_N[None]).logits[0].float()
        module.set_attn_implementation(_NAME)
    difference = (ours_NV - theirs_NV).abs().max().item()
    if not difference <= _TOLERANCE[module.dtype] * max(1.0, theirs_NV.abs().max().item()):
        raise ModelError(
            f"{folder.path}: with our attention the logits of {folder.config.get('model_type')} are off by "
            f"{difference:.2g}; this architecture changes attention or logits in a way that is not supported"
        )
