"""Weights in bfloat16 with float32 copies for the optimiser; layers that are computed again for the backward pass."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from manege.config import CreditConfig, TrainConfig
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.load import load_model, weights_dtype
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from tests.calls import merged, weighted
from tests.unit.test_model_llama import write_random_model

ROOT = Path(__file__).parents[2]
FOLDER = open_folder(str(ROOT / "tests" / "tiny" / "model"))
OBJECTIVE = objective_of(CreditConfig(clip_high=0.28))
RATE, STEPS = 2e-5, 25


def make_engine(dtype, **settings):
    model = load_model(FOLDER, dtype=dtype)
    return model, TorchEngine(model, FOLDER, TrainConfig(learning_rate=RATE, warmup_steps=0, **settings))


def on_policy(engine):
    batch = weighted("rollout_mean", merged)
    recorded = engine.logprobs([item.sample for item in batch])
    return [
        dataclasses.replace(item, sample=dataclasses.replace(item.sample, logprobs_M=logprobs))
        for item, logprobs in zip(batch, recorded, strict=True)
    ]


def flat(model):
    return torch.cat([parameter.detach().float().flatten() for parameter in model.module.parameters()])


def gained(engine, batch):
    """What the better rollout's log-probability rose by."""
    [after] = engine.logprobs([batch[0].sample])
    return float((after - batch[0].sample.logprobs_M).sum())


def engine_steps(dtype):
    model, engine = make_engine(dtype)
    before, batch = flat(model), on_policy(engine)
    for _ in range(STEPS):
        engine.step(batch, OBJECTIVE)
    return before, flat(model), gained(engine, batch)


def naive_steps(dtype):
    """The same with an optimiser over the weights themselves."""
    model, engine = make_engine(torch.float32)
    before, batch = flat(model), on_policy(engine)
    weights = [torch.nn.Parameter(parameter.detach().to(dtype)) for parameter in model.module.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(STEPS):
        model.module.zero_grad()
        engine.accumulate(batch, OBJECTIVE)
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        for weight, parameter in zip(weights, model.module.parameters(), strict=True):
            weight.grad = parameter.grad.to(dtype)
        optimizer.step()
        for weight, parameter in zip(weights, model.module.parameters(), strict=True):
            parameter.data.copy_(weight)
    return before, flat(model), gained(engine, batch)


def test_bfloat16_weights_with_float32_copies_learn_what_float32_learns():
    """At the default learning rate, where an optimiser over bfloat16 weights moves no weight of ordinary size."""
    before, after, wanted = engine_steps(torch.float32)
    moved = after - before
    rounded, after_rounded, got = engine_steps(torch.bfloat16)
    _, after_naive, naive = naive_steps(torch.bfloat16)
    # From here on neighbours in bfloat16 are at least 1.2e-4 apart: six steps of 2e-5.
    ordinary = rounded.abs() >= 2**-6
    assert (after_naive[ordinary] != rounded[ordinary]).float().mean() < 0.001
    of_copies = torch.nn.functional.cosine_similarity((after_rounded - rounded)[ordinary], moved[ordinary], dim=0)
    assert of_copies > 0.75
    assert got > 0.9 * wanted > 0
    assert naive < 0.65 * wanted


def test_many_micro_batches_add_up_under_bfloat16_as_one_does():
    norms = []
    for tokens in (20, 4096):
        _, engine = make_engine(torch.bfloat16, micro_batch_tokens=tokens, prefix_tree=False)
        norms.append(engine.step(weighted("rollout_mean", merged), OBJECTIVE).metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_a_resumed_bfloat16_engine_goes_on_from_its_copies(tmp_path):
    """Exactly: from the rounded weights alone the later steps would differ."""
    (model, straight), (other, resumed) = make_engine(torch.bfloat16), make_engine(torch.bfloat16)
    batch = on_policy(straight)
    for _ in range(5):
        straight.step(batch, OBJECTIVE)
    straight.save(tmp_path / "checkpoint")
    resumed.load(tmp_path / "checkpoint")
    for _ in range(5):
        straight.step(batch, OBJECTIVE)
        resumed.step(batch, OBJECTIVE)
    assert torch.equal(flat(model), flat(other))


def test_a_bfloat16_checkpoint_goes_on_in_float32(tmp_path):
    _, first = make_engine(torch.bfloat16)
    batch = on_policy(first)
    first.step(batch, OBJECTIVE)
    first.save(tmp_path / "checkpoint")
    _, wide = make_engine(torch.float32)
    wide.load(tmp_path / "checkpoint")
    before = wide.logprobs([batch[0].sample])[0].sum()
    wide.step(batch, OBJECTIVE)
    assert wide.logprobs([batch[0].sample])[0].sum() > before


def test_a_failed_update_restores_bfloat16_weights():
    model, engine = make_engine(torch.bfloat16)
    batch, before = on_policy(engine), flat(model)

    def fail_late():
        with engine.undone_on_error():
            for _ in range(20):
                engine.step(batch, OBJECTIVE)
            assert not torch.equal(flat(model), before)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_late()
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_has_the_precision_of_the_weights(tmp_path, dtype):
    model, engine = make_engine(dtype)
    engine.step(on_policy(engine), OBJECTIVE)
    engine.export(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert theirs.dtype is dtype
    ours = dict(model.module.named_parameters())
    assert all(torch.equal(ours[name], parameter) for name, parameter in theirs.named_parameters())


def test_the_automatic_precision_follows_the_device():
    assert weights_dtype("auto", "cpu") is torch.float32
    assert weights_dtype("auto", "cuda:1") is torch.bfloat16
    assert weights_dtype("bfloat16", "cpu") is torch.bfloat16
    assert weights_dtype("float32", "cuda") is torch.float32


def gradients(model, ids):
    model.logits(model.hidden(ids, torch.arange(len(ids)), causal_attend([len(ids)]))).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.module.named_parameters()}


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_neox", "olmo2"])
def test_layers_that_are_computed_again_give_the_same_gradients(tmp_path, model_type):
    """Ours, and those of transformers, whose attention reaches us by a context."""
    folder = write_random_model(tmp_path, model_type, {})
    plain, again = load_model(folder), load_model(folder)
    again.checkpoint_layers()
    ids = torch.randint(0, 300, (40,))
    want, got = gradients(plain, ids), gradients(again, ids)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_step_with_layers_computed_again_is_the_same_step():
    results = []
    for checkpointing in (False, True):
        model, engine = make_engine(torch.float32, gradient_checkpointing=checkpointing)
        metrics = engine.step(on_policy(engine), OBJECTIVE).metrics
        results.append((metrics, flat(model)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


PEAK = """
import re, torch
from pathlib import Path
from manege.model.attend import causal_attend
from manege.model.llama import Llama
config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 24,
    "vocab_size": 100, "num_attention_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "tie_word_embeddings": True}
torch.set_num_threads(1)
model = Llama(config)
for parameter in model.module.parameters():
    torch.nn.init.normal_(parameter, std=0.02)
ids = torch.arange(2048) % 100
def peak_mb():
    # Of this program alone: ru_maxrss begins with the size of who started it.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
def compute(num):
    model.logits(model.hidden(ids[:num], torch.arange(num), causal_attend([num // 8] * 8))).mean().backward()
model.checkpoint_layers()
compute(8)  # What torch loads, and the gradients' own room.
before, peaks = peak_mb(), []
for again in (True, False):
    model._checkpoints = again
    compute(2048)
    peaks.append(peak_mb() - before)
print(*peaks)
"""


def test_layers_that_are_computed_again_take_less_memory():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    again_mb, plain_mb = map(float, done.stdout.split())
    assert again_mb < 0.4 * plain_mb
