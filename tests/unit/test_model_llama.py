"""Our Llama-family code computes what transformers computes, and writes what transformers reads."""

import json

import pytest
import torch
import transformers

from manege.errors import ModelError
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.llama import Llama, can_compute
from manege.model.load import export_folder, load_model, read_weights
from tests.conftest import TINY_MODEL

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, biases and wide heads": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama 3.1 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


def write_random_model(folder, model_type, settings):
    """A folder of random weights with the tokenizer of the tiny model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES | settings)
    module = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in module.parameters():  # biases and norms too, which start as 0 and 1
        torch.nn.init.normal_(parameter, std=0.2)
    module.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY_MODEL / name).read_bytes())
    return open_folder(str(folder))


def logits_of(model, lengths, ids):
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.inference_mode():
        return model.logits(model.hidden(ids, positions, causal_attend(lengths)))


@pytest.mark.parametrize(("model_type", "settings"), FAMILIES.values(), ids=FAMILIES.keys())
def test_logits_equal_those_of_transformers(tmp_path, model_type, settings):
    folder = write_random_model(tmp_path, model_type, settings)
    model = load_model(folder)
    assert isinstance(model, Llama)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    lengths = [150, 1, 40]
    ids = torch.randint(0, SIZES["vocab_size"], (sum(lengths),))
    ours = logits_of(model, lengths, ids)
    with torch.inference_mode():
        theirs = torch.cat([reference(part[None]).logits[0] for part in ids.split(lengths)])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_smollm2_equals_transformers_on_logits_and_tokens():
    folder = open_folder("smollm2")
    text = "<|im_start|>user\nPort 8081 of 23*17 is  in\tcafé.txt 🙂<|im_end|>\n<|im_start|>assistant\n"
    ids = folder.tokenizer.encode(text).ids
    assert ids == transformers.AutoTokenizer.from_pretrained(folder.path).encode(text)
    assert folder.tokenizer.decode(ids, skip_special_tokens=False) == text
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder.path).eval()
    with torch.inference_mode():
        theirs = reference(torch.tensor([ids])).logits[0]
    ours = logits_of(load_model(folder), [len(ids)], torch.tensor(ids))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_an_exported_folder_has_the_present_weights_for_transformers_and_for_us(tmp_path, model_type):
    source = write_random_model(tmp_path / "source", model_type, {})
    model = load_model(source)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(0.01)
    target = tmp_path / "runs" / "export"
    for _ in range(2):  # an export over an older one
        export_folder(model, source, target)
    assert [path.name for path in target.parent.iterdir()] == ["export"]
    ids = torch.arange(20)
    expected = logits_of(model, [20], ids)
    torch.testing.assert_close(logits_of(load_model(open_folder(str(target))), [20], ids), expected)
    reference = transformers.AutoModelForCausalLM.from_pretrained(target)
    with torch.inference_mode():
        torch.testing.assert_close(reference(ids[None]).logits[0], expected, atol=1e-4, rtol=1e-4)


def test_gradients_flow_to_every_parameter(tmp_path):
    model = load_model(write_random_model(tmp_path, "qwen2", {}))
    ids = torch.arange(12)
    model.logits(model.hidden(ids, ids, causal_attend([12]))).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.module.parameters())


def test_weights_that_do_not_fit_are_named(tmp_path):
    folder = write_random_model(tmp_path, "llama", {})
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ModelError, match=r"weight model\..* has shape .*, config.json says"):
        read_weights(Llama(config | {"intermediate_size": 128}), folder.path)
    with pytest.raises(ModelError, match=r"9 weights are missing, model\.layers\.3"):
        read_weights(Llama(config | {"num_hidden_layers": 4}), folder.path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_model(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        load_model(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "mistral"},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_configs_of_other_models_are_left_to_transformers(settings):
    assert can_compute({"model_type": "llama"})
    assert not can_compute({"model_type": "llama"} | settings)
