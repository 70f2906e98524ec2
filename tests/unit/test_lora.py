"""Adapters: trained alone, sampled with, written merged and by themselves, and off where the reference is asked."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from manege.config import CreditConfig, EngineConfig, TrainConfig
from manege.engine.base import Sampling, Weights, collect
from manege.engine.local import LocalEngine
from manege.errors import TrainerError
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from manege.types import PolicyVersion
from tests.calls import merged, weighted
from tests.unit.test_model_llama import write_random_model

ROOT = Path(__file__).parents[2]
TINY = open_folder(str(ROOT / "tests" / "tiny" / "model"))
OBJECTIVE = objective_of(CreditConfig(clip_high=0.28))
BATCH = weighted("rollout_mean", merged)


def make_engine(folder=TINY, *, dtype=torch.float32, reference=False, **settings):
    model = load_model(folder, dtype=dtype)
    config = TrainConfig(**{"learning_rate": 1e-2, "warmup_steps": 0, "lora_rank": 4} | settings)
    return model, TorchEngine(model, folder, config, reference=reference)


@pytest.fixture(scope="module", params=["llama", "gpt_neox"])
def folder(request, tmp_path_factory):
    """Of our own model code, and of one that comes from transformers."""
    return write_random_model(tmp_path_factory.mktemp(request.param), request.param, {})


def adapters_of(model):
    return {name: p.detach() for name, p in model.module.named_parameters() if ".lora_" in name}


def table_of(model, ids_T):
    with torch.no_grad():
        return torch.log_softmax(model(torch.from_numpy(ids_T).long()[None]).logits[0].float(), -1)


def logprobs_of(model, sample):
    """By a model of transformers."""
    table = table_of(model, sample.ids_T)
    return np.array([table[t - 1, sample.ids_T[t]].item() for t in sample.positions_M])


def test_only_adapters_change_and_only_they_are_in_the_optimiser():
    model, engine = make_engine()
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    for _ in range(2):
        engine.step(BATCH, OBJECTIVE)
    changed = {name for name, p in model.module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == adapters_of(model).keys()
    held = sum(p.numel() for group in engine._optimizer.param_groups for p in group["params"])
    assert held == sum(before[name].numel() for name in changed) < 0.25 * sum(p.numel() for p in before.values())


def test_new_adapters_change_nothing_and_are_the_same_everywhere():
    (plain, _), (first, engine), (second, _) = make_engine(lora_rank=0), make_engine(), make_engine()
    theirs = TorchEngine(plain, TINY, TrainConfig())
    for item in BATCH:
        assert np.array_equal(engine.logprobs([item.sample])[0], theirs.logprobs([item.sample])[0])
    ours, others = (dict(model.module.named_parameters()) for model in (first, second))
    assert all(torch.equal(ours[name], others[name]) for name in ours)


def test_chosen_layers_alone_get_adapters():
    model, _ = make_engine(lora_targets=["q_proj", "down_proj"])
    assert {name.partition(".lora_")[0].rpartition(".")[2] for name in adapters_of(model)} == {"q_proj", "down_proj"}


def test_an_unknown_layer_is_refused_with_those_that_there_are():
    with pytest.raises(TrainerError, match=r"no linear layer 'query'.*down_proj, gate_proj, k_proj"):
        make_engine(lora_targets=["query"])


def test_the_head_gets_no_adapter(folder):
    model, _ = make_engine(folder)
    assert not any("embed_out" in name or "lm_head" in name for name in adapters_of(model))
    with pytest.raises(TrainerError, match="no linear layer"):
        make_engine(folder, lora_targets=["embed_out"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_alpha": 8}, "lora_alpha = 8.0 does nothing here: it needs lora_rank > 0"),
        ({"lora_targets": ["q_proj"]}, "does nothing here: it needs lora_rank > 0"),
        (
            {"lora_rank": 4, "frozen": ["embed"]},
            "it needs lora_rank = 0; with adapters lora_targets says what is trained",
        ),
    ],
    ids=["alpha", "targets", "frozen"],
)
def test_settings_that_would_do_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**settings)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_an_export_is_a_merged_model_and_adapters_that_peft_reads_over_the_base(folder, tmp_path):
    _, engine = make_engine(folder, lora_alpha=6)
    for _ in range(3):
        engine.step(BATCH, OBJECTIVE)
    ours = [engine.logprobs([item.sample])[0] for item in BATCH]
    engine.export(tmp_path / "model")
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(folder.path)
    was = [logprobs_of(base, item.sample) for item in BATCH]
    adapted = PeftModel.from_pretrained(base, tmp_path / "model" / "adapter")
    for item, logprobs, before in zip(BATCH, ours, was, strict=True):
        assert np.abs(logprobs - before).max() > 0.003
        np.testing.assert_allclose(logprobs_of(merged_model, item.sample), logprobs, atol=2e-4)
        np.testing.assert_allclose(logprobs_of(adapted, item.sample), logprobs, atol=2e-4)
    written = json.loads((tmp_path / "model" / "adapter" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["base_model_name_or_path"]) == (4, 6, folder.name)


def test_the_weights_of_the_base_are_in_no_export_changed(tmp_path):
    model, engine = make_engine()
    before = {name: p.detach().clone() for name, p in model.module.named_parameters() if ".lora_" not in name}
    engine.step(BATCH, OBJECTIVE)
    engine.export(tmp_path / "model")
    assert all(torch.equal(dict(model.module.named_parameters())[name], tensor) for name, tensor in before.items())
    exported, base = load_file(tmp_path / "model" / "model.safetensors"), load_file(TINY.path / "model.safetensors")
    assert exported.keys() == base.keys()
    changed = {name for name in base if not torch.equal(exported[name], base[name].float())}
    assert changed == {name for name in base if "_proj" in name}


@pytest.mark.anyio
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_the_local_engine_samples_with_the_adapters(folder, dtype):
    """Also after a step, over a cache, with prefixes that come back."""
    model, engine = make_engine(folder, dtype=dtype)
    sampler = LocalEngine(model, folder, config=EngineConfig(threads=1), seed=0)
    prompt = BATCH[0].sample.ids_T[:20].tolist()

    async def gap():
        generation = await collect(sampler.generate(prompt, Sampling(max_new_tokens=16)))
        longer = await collect(sampler.generate([*prompt, *generation.ids_R.tolist()], Sampling(max_new_tokens=8)))
        gaps = []
        for start, answer in ((prompt, generation), ([*prompt, *generation.ids_R.tolist()], longer)):
            ids = np.array([*start, *answer.ids_R.tolist()], np.int32)
            table = trainer_table(model, ids)
            mine = table[np.arange(len(start) - 1, len(ids) - 1), ids[len(start) :]]
            gaps.append(np.abs(mine - answer.logprobs_R).max())
        return max(gaps), table[len(start) - 1]

    tolerance = 1e-4 if dtype is torch.float32 else 0.15
    try:
        before, first = await gap()
        await sampler.pause()
        for _ in range(3):
            engine.step(BATCH, OBJECTIVE)
        await sampler.load(Weights(kind="shared"), PolicyVersion(1))
        await sampler.resume()
        after, second = await gap()
    finally:
        await sampler.close()
    assert before < tolerance
    assert after < tolerance
    assert np.abs(first - second).max() > 0.05


def trainer_table(model, ids_T):
    ids = torch.from_numpy(ids_T).long()
    with torch.no_grad():
        logits = model.logits(model.hidden(ids, torch.arange(len(ids)), causal_attend([len(ids)])))
    return torch.log_softmax(logits, -1).numpy()


def test_adapters_of_bfloat16_weights_are_float32_and_learn():
    model, engine = make_engine(dtype=torch.bfloat16, learning_rate=2e-4)
    assert {parameter.dtype for parameter in adapters_of(model).values()} == {torch.float32}
    before = engine.logprobs([BATCH[0].sample])[0].sum()
    for _ in range(10):
        engine.step(BATCH, OBJECTIVE)
    assert engine.logprobs([BATCH[0].sample])[0].sum() > before


def test_the_reference_is_the_base_and_no_copy_is_kept():
    """The divergence is what a full copy would give, and the adapters are on again afterwards."""
    _, engine = make_engine(reference=True)
    samples = [item.sample for item in BATCH]
    base = engine.logprobs(samples)
    for _ in range(3):
        engine.step(BATCH, OBJECTIVE)
    now = engine.logprobs(samples)
    metrics = engine.step(BATCH, dataclasses.replace(OBJECTIVE, kl=0.1)).metrics
    distance_M = np.concatenate(base) - np.concatenate(now)
    assert metrics["kl_reference"] == pytest.approx(np.mean(np.exp(distance_M) - distance_M - 1), rel=1e-3)
    assert metrics["kl_reference"] > 1e-4
    assert engine._reference is None
    assert not any(np.array_equal(a, b) for a, b in zip(engine.logprobs(samples), base, strict=True))


@pytest.mark.parametrize("other", [{"lora_rank": 8}, {"lora_targets": ["q_proj"]}, {"lora_rank": 0}])
def test_a_checkpoint_of_other_adapters_is_refused(tmp_path, other):
    _, engine = make_engine()
    engine.save(tmp_path / "checkpoint")
    with pytest.raises(TrainerError):
        make_engine(**other)[1].load(tmp_path / "checkpoint")


def test_layers_computed_again_give_the_same_adapters(folder):
    results = []
    for checkpointing in (False, True):
        model, engine = make_engine(folder, gradient_checkpointing=checkpointing)
        engine.step(BATCH, OBJECTIVE)
        engine.step(BATCH, OBJECTIVE)
        results.append(adapters_of(model))
    assert all(torch.allclose(results[0][name], results[1][name], atol=1e-7) for name in results[0])


def test_published_weights_are_merged(tmp_path):
    model = load_model(TINY)
    config = TrainConfig(learning_rate=1e-2, warmup_steps=0, lora_rank=4)
    engine = TorchEngine(model, TINY, config, publish_folder=tmp_path)
    engine.step(BATCH, OBJECTIVE)
    reader = TorchEngine(load_model(open_folder(engine.publish().folder)), TINY, TrainConfig())
    sample = BATCH[0].sample
    np.testing.assert_allclose(reader.logprobs([sample])[0], engine.logprobs([sample])[0], atol=1e-4)
