"""Architectures without code of ours run through transformers, or are refused."""

import pytest
import torch
import transformers

from manege.errors import ModelError
from manege.model.attend import causal_attend
from manege.model.foreign import Foreign
from manege.model.load import export_folder, load_model
from tests.unit.test_model_llama import logits_of, write_random_model


@pytest.mark.parametrize("model_type", ["gpt_neox", "olmo2", "gemma"])
def test_a_full_attention_architecture_gives_the_logits_of_transformers(tmp_path, model_type):
    folder = write_random_model(tmp_path / "source", model_type, {"head_dim": 16})
    model = load_model(folder)
    assert isinstance(model, Foreign)
    lengths = [60, 1, 20]
    ids = torch.randint(0, 300, (sum(lengths),))
    ours = logits_of(model, lengths, ids)
    export_folder(model, folder, tmp_path / "export")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
    with torch.inference_mode():
        theirs = torch.cat([reference(part[None]).logits[0] for part in ids.split(lengths)])
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_gradients_flow_through_our_attention(tmp_path):
    model = load_model(write_random_model(tmp_path, "gpt_neox", {}))
    ids = torch.arange(12)
    model.logits(model.hidden(ids, ids, causal_attend([12]))).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.module.parameters())


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("mistral", {"sliding_window": 64}, "mistral has a sliding window of 64 tokens"),
        ("gemma3_text", {"head_dim": 16}, "gemma3_text has layers of type sliding_attention"),
        ("gemma2", {"head_dim": 16, "layer_types": ["full_attention"] * 3}, "logits of gemma2 are off by"),
        ("cohere", {"logit_scale": 0.5}, "logits of cohere are off by"),
    ],
    ids=["window", "some layers with a window", "soft cap", "scaled logits"],
)
def test_what_our_attention_would_compute_wrongly_is_refused(tmp_path, model_type, settings, reason):
    folder = write_random_model(tmp_path, model_type, settings)
    with pytest.raises(ModelError, match=reason):
        load_model(folder)
