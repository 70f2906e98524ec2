"""Models of random weights for `benchmarks.gpu`: shapes of published ones, ours and that of `transformers` over the
same memory, and what the hardware could do at most.
"""

import dataclasses
import time
from pathlib import Path

import torch
import transformers
from torch import nn

from manege.model.folder import open_folder
from manege.model.llama import Llama

TINY = Path(__file__).parents[1] / "tests" / "tiny" / "model"
COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "hidden_act": "silu", "eos_token_id": 0}


def shape(model_type, width, inner, layers, heads, kv_heads, vocabulary, *, head_dim, tied):
    return COMMON | {
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
    }


SIZES = {
    "trial": shape("qwen2", 128, 384, 4, 4, 2, 2048, head_dim=32, tied=True),  # no published one
    "0.5B": shape("qwen2", 896, 4864, 24, 14, 2, 151936, head_dim=64, tied=True),  # Qwen2.5-0.5B
    "1.5B": shape("qwen2", 1536, 8960, 28, 12, 2, 151936, head_dim=128, tied=True),  # Qwen2.5-1.5B
    "3B": shape("llama", 3072, 8192, 28, 24, 8, 128256, head_dim=128, tied=True),  # Llama-3.2-3B
    "8B": shape("llama", 4096, 14336, 32, 32, 8, 128256, head_dim=128, tied=False),  # Llama-3.1-8B
}


def make_model(size, device, dtype):
    """A model and the folder that the engines want, with the tokenizer of the tiny model."""
    config = SIZES[size]
    with torch.device("meta"):
        model = Llama(config)
    model.module.to(dtype).to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=0.02)
    folder = dataclasses.replace(
        open_folder(str(TINY)), name=size, config=config, context_limit=config["max_position_embeddings"]
    )
    return model, folder


def theirs_over(model, size):
    """The same parameters in the code of `transformers`."""
    config = transformers.AutoConfig.for_model(**SIZES[size])
    parameter = next(model.module.parameters())
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=parameter.dtype
        )
    module.load_state_dict(dict(model.module.named_parameters()), strict=False, assign=True)
    module.tie_weights()
    rotary = module.model.rotary_emb
    module.model.rotary_emb = type(rotary)(config).to(parameter.device)
    left = [name for name, p in [*module.named_parameters(), *module.named_buffers()] if p.is_meta]
    assert not left, left
    return module


class Limits:
    """Of the device, measured: what a copy moves and what a product of matrices computes, per second."""

    def __init__(self, device, dtype):
        on_gpu = torch.device(device).type == "cuda"
        source = torch.empty(2**30 if on_gpu else 2**26, dtype=torch.uint8, device=device).zero_()
        target = torch.empty_like(source)
        self.bytes_per_s = 2 * source.numel() / fastest(lambda: target.copy_(source), device)
        side = 8192 if on_gpu else 1024
        left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        self.flops_per_s = 2 * side**3 / fastest(lambda: left @ right, device)

    def decode(self, size, dtype, batch, context):
        """Tokens/s when all weights and all keys and values are read once per step and nothing else costs anything."""
        per_token = 2 * SIZES[size]["num_hidden_layers"] * SIZES[size]["num_key_value_heads"] * SIZES[size]["head_dim"]
        num_bytes = (products(size) + batch * context * per_token) * dtype.itemsize
        return batch * self.bytes_per_s / num_bytes

    def prefill(self, size, length):
        """Tokens/s at two operations per weight and token, and causal attention; one row of logits is left out."""
        return self.flops_per_s / (2 * (products(size) - head(size)) + attention(size, length))

    def train(self, size, length, *, trained, again):
        """The same for forward and backward, which is twice the forward pass; `again`: layers are computed twice;
        `trained`: the share of tokens that need logits."""
        forward = 2 * (products(size) - head(size)) + attention(size, length)
        return self.flops_per_s / ((4 if again else 3) * forward + 3 * 2 * trained * head(size))


def products(size):
    """Weights that a token is multiplied with, the head among them."""
    with torch.device("meta"):
        module = Llama(SIZES[size]).module
    total = sum(parameter.numel() for parameter in module.parameters())
    return total if SIZES[size]["tie_word_embeddings"] else total - head(size)


def head(size):
    return SIZES[size]["vocab_size"] * SIZES[size]["hidden_size"]


def attention(size, length):
    """Operations per token of causal attention: two products over half of the length."""
    return 2 * length * SIZES[size]["num_hidden_layers"] * SIZES[size]["num_attention_heads"] * SIZES[size]["head_dim"]


def synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def fastest(action, device, repeats=5):
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])
