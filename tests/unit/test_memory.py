"""What is reckoned of memory is what real engines take, as far as it is said to be exact."""

from pathlib import Path

import pytest
import torch

from manege.config import CreditConfig, RunConfig, parse_config
from manege.engine.kv_cache import KvCache
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.model.shape import shape_of
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.memory import GIB, engine_room, longest_sample, torch_rank, verl_rank
from manege.trainer.objective import objective_of
from tests.calls import merged, weighted

FOLDER = open_folder(str(Path(__file__).parents[1] / "tiny" / "model"))
SHAPE = shape_of(FOLDER.config)
LARGE = shape_of(
    {
        "model_type": "qwen3",
        "vocab_size": 150_000,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    }
)


def run(**sections) -> RunConfig:
    tree = {"name": "x", "tasks": {"train": "a.jsonl"}, "agent": {"run": ["x"]}, "scorer": {"run": ["y"]}}
    return parse_config({**tree, **sections})


def num_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "train", [{}, {"frozen": ["embed_tokens"]}, {"lora_rank": 4}, {"lora_rank": 2, "lora_targets": ["q_proj"]}]
)
def test_weights_gradients_and_optimiser_are_those_of_the_torch_engine(train, dtype):
    if "lora_rank" in train:
        pytest.importorskip("peft")
    config = run(model={"dtype": dtype}, train={**train, "prefix_tree": False})
    model = load_model(FOLDER, dtype=getattr(torch, dtype))
    weights = num_bytes(model.module.parameters())
    engine = TorchEngine(model, FOLDER, config.train)
    engine.accumulate(weighted("rollout_mean", merged), objective_of(CreditConfig()))
    parts = dict(torch_rank(config, SHAPE, on_gpu=False, serves=False).parts)
    assert parts["weights"] == weights
    assert parts["gradients"] == num_bytes(p.grad for p in engine._parameters)
    engine.step(weighted("rollout_mean", merged), objective_of(CreditConfig()))
    state = engine._optimizer.state_dict()["state"]
    assert parts["optimiser"] == num_bytes(row[name] for row in state.values() for name in ("exp_avg", "exp_avg_sq"))
    own = [p for p in engine._parameters if all(p is not other for other in model.module.parameters())]
    inside = [p for name, p in model.module.named_parameters() if "lora_" in name]
    assert parts.get("float32 copies", 0) + parts.get("adapters", 0) == num_bytes([*own, *inside])


def test_the_cache_is_that_of_the_local_engine():
    config = run(engine={"cache_tokens": 8192})
    cache = KvCache(load_model(FOLDER), config.engine.cache_tokens)
    cache.grow(256)
    parts = torch_rank(config, SHAPE, on_gpu=False, serves=True).parts
    # The cache has a column more than tokens for each sequence.
    assert parts["KV cache"] == pytest.approx(cache.pool_RL2TKD.nbytes, rel=0.01)
    assert "KV cache" not in torch_rank(config, SHAPE, on_gpu=False, serves=False).parts


def test_verl_divides_what_stays_among_the_ranks_and_gathers_two_layers():
    demands = [
        verl_rank(run(backend={"kind": "verl", "ranks_per_node": ranks}), LARGE, on_gpu=True) for ranks in (1, 8)
    ]
    one, eight = (demand.parts for demand in demands)
    assert one["weights, a part"] == 4 * LARGE.num_parameters == 8 * eight["weights, a part"]
    assert one["optimiser, a part"] == 8 * LARGE.num_parameters
    assert demands[1].state == demands[0].state / 8 == 12 * LARGE.num_parameters / 8
    assert one["gathered layers, about"] == eight["gathered layers, about"]
    assert one["logits, at most"] == 40960 * 150_000 * 10


def test_gradient_checkpointing_keeps_one_layer_and_what_lies_between():
    plain, checkpointed = (
        torch_rank(run(train={"gradient_checkpointing": on}), LARGE, on_gpu=True, serves=False).parts[
            "activations, about"
        ]
        for on in (False, True)
    )
    assert plain == 2 * 40960 * 36 * LARGE.activations_per_token
    assert checkpointed == 2 * 40960 * (36 * 4096 + LARGE.activations_per_token)


@pytest.mark.parametrize(
    ("sections", "tokens"),
    [
        ({}, 40960),
        ({"model": {"max_context": 8192}}, 8192),
        ({"model": {"max_context": 8192}, "train": {"max_sample_tokens": 4096}}, 4096),
    ],
)
def test_the_longest_sample_is_bounded_by_context_and_settings(sections, tokens):
    assert longest_sample(run(**sections), LARGE) == tokens


def test_an_engine_has_what_its_weights_and_its_own_work_leave():
    engines = {"count": 1, "tensor_parallel": 2, "options": {"gpu_memory_utilization": 0.8}}
    config = run(backend={"engines": engines})
    room = engine_room(config.backend, config.model, LARGE, 80 * GIB)
    assert room.taken == 64 * GIB
    assert room.weights == LARGE.num_parameters
    assert room.cache == 60 * GIB - room.weights
    # 8 heads of keys and values on two GPUs, in bfloat16.
    assert room.per_token == 2 * 36 * 4 * 128 * 2
    assert room.num_sequences(32768) == room.cache // (32768 * room.per_token)


def test_heads_of_keys_and_values_that_are_fewer_than_gpus_are_on_each():
    engines = {"count": 1, "tensor_parallel": 16, "options": {"kv_cache_dtype": "fp8"}}
    config = run(backend={"engines": engines})
    assert engine_room(config.backend, config.model, LARGE, 80 * GIB).per_token == 2 * 36 * 128
