"""The plan of a run: what is where, and every reason why it cannot be."""

import json
import re
import shlex
from pathlib import Path

import pytest

from manege.cli.machine import Machine
from manege.cli.plan import make_plan
from manege.config import parse_config
from manege.engine.commands import server_command
from manege.trainer.memory import GIB

RECIPES = Path(__file__).parents[2] / "src" / "manege" / "recipes"
QWEN = json.loads((RECIPES / "general" / "qwen3-4b-instruct-2507.json").read_text())
FOLDER = Path("/models/qwen")
FITS = {
    "model": {"path": "/models/qwen", "max_context": 8192},
    "train": {"gradient_checkpointing": True, "micro_batch_tokens": 8192},
    "backend": {"kind": "verl", "ranks_per_node": 4, "engines": {"count": 2, "tensor_parallel": 2}},
}


def planned(num_gpus=8, gib=80, config=QWEN, gateway_url=None, num_tasks=None, **sections):
    tree = {"name": "x", "tasks": {"train": "a.jsonl"}, "agent": {"run": ["x"]}, "scorer": {"run": ["y"]}}
    machine = Machine(num_gpus=num_gpus, gpu_bytes=int(gib * GIB), is_here=False, memory_bytes=None)
    run = parse_config({**tree, **FITS, **sections})
    return make_plan(run, config, FOLDER, machine, gateway_url=gateway_url, num_tasks=num_tasks), run


def rows(plan, title):
    return dict(next(rows for name, rows in plan.sections if name == title))


def test_a_run_that_fits_is_planned_without_a_reason_against_it():
    plan, _ = planned()
    assert plan.reasons == []
    assert rows(plan, "machines") == {
        "1": "8 GPUs of 80 GiB; GPU 0: rank 0; GPU 1: rank 1; GPU 2: rank 2; GPU 3: rank 3; GPUs 4-5: engine 0; "
        "GPUs 6-7: engine 1"
    }


def test_command_lines_are_those_that_start_the_engines():
    plan, run = planned()
    for index, gpus in enumerate(("4,5", "6,7")):
        words = shlex.split(rows(plan, "processes")[f"engine {index}"])
        assert f"CUDA_VISIBLE_DEVICES={gpus}" in words
        command = list(server_command(run.backend, run.model, FOLDER, port=0, package="vllm"))
        command[command.index("--port") + 1] = "PORT"
        assert words[-len(command) :] == command


def test_machines_of_a_cluster_are_listed_and_engines_are_on_the_first():
    plan, _ = planned(backend={**FITS["backend"], "nodes": 2, "ray_address": "auto"})
    machines = rows(plan, "machines")
    assert "GPU 3: rank 3" in machines["1"]
    assert "engine 1" in machines["1"]
    assert machines["2"] == "8 GPUs of 80 GiB; GPU 0: rank 4; GPU 1: rank 5; GPU 2: rank 6; GPU 3: rank 7"
    assert rows(plan, "processes")["Ray"] == "auto"


def test_what_verl_is_told_is_shown():
    plan, _ = planned(backend=backend(verl={"engine": {"forward_prefetch": True}}))
    told = rows(plan, "verl, in each rank")
    assert told["engine.max_token_len_per_gpu"] == "8192"
    assert told["engine.forward_prefetch"] == "True"
    assert told["model.enable_gradient_checkpointing"] == "True"
    assert told["optimizer.lr"] == "2e-05"


def test_a_batch_is_worked_out():
    train = {**FITS["train"], "groups": 16, "group_size": 8, "mini_batches": 2, "steps": 100, "schedule": "async"}
    plan, _ = planned(train=train, num_tasks=2000, controller={"slots": 100})
    batch = rows(plan, "batch")
    assert batch["a step"] == "16 groups x 8 = 128 rollouts"
    assert batch["optimiser"] == "2 steps of 64 rollouts, divided among 4 ranks"
    assert batch["under way"] == "32 groups = 256 rollouts, 100 agents at once; 156 of them wait for a slot"
    assert batch["the run"] == "100 steps = 12,800 rollouts, 0.80 passes over 2,000 tasks"


def backend(**changes):
    engines = {**FITS["backend"]["engines"], **changes.pop("engines", {})}
    return {**FITS["backend"], "engines": engines, **changes}


REFUSED = {
    "more GPUs than there are": ({"num_gpus": 6}, r"8 GPUs are needed, a machine has 6"),
    "one engine too many": ({"backend": backend(engines={"count": 3})}, r"10 GPUs are needed.*lower one of them"),
    "ranks and engines that share, too many": (
        {"backend": backend(colocated=True, ranks_per_node=9)},
        r"9 GPUs are needed",
    ),
    "heads that cannot be divided": (
        {"num_gpus": 12, "backend": backend(engines={"count": 1, "tensor_parallel": 5})},
        r"tensor_parallel = 5 does not divide the model's 32 heads; 1, 2, 4, 8, 16, 32 do",
    ),
    "a GPU too small for a rank": ({"gib": 16}, r"a rank takes .* GiB, a GPU has 16.0 GiB; bound the longest sample"),
    "a GPU too small for an engine": (
        {"gib": 10, "backend": backend(engines={"tensor_parallel": 1})},
        r"an engine has .* of a GPU for its cache, and one sequence of 8192 tokens takes 1.1 GiB",
    ),
    "a context that the model was not made for": (
        {"model": {"path": "/models/qwen", "max_context": 300_000}},
        r"model.max_context = 300000: the train engine takes samples of at most 262144 tokens",
    ),
    "an answer as long as the context": (
        {"sampling": {"max_new_tokens": 8192}},
        r"sampling.max_new_tokens = 8192 leaves no room",
    ),
    "a GPU on a machine without": ({"num_gpus": 0, "model": {"device": "cuda", "max_context": 8192}}, "no GPU here"),
    "a prefix tree that verl has not": (
        {"train": {**FITS["train"], "prefix_tree": True}},
        "train.prefix_tree = true: this train engine has none",
    ),
    "a reference that megatron keeps not": (
        {"credit": {"kl": 0.1}, "backend": backend(strategy="megatron")},
        "credit.kl = 0.1: this train engine keeps no reference",
    ),
    "adapters with verl": ({"train": {**FITS["train"], "lora_rank": 4}}, r"train.lora_rank = 4: verl's workers"),
    "a key of verl's that is ours": (
        {"backend": backend(verl={"engine": {"strategy": "fsdp"}})},
        "backend.verl.engine.strategy is not verl's to say here",
    ),
    "verl without engines": ({"backend": {"kind": "verl", "ranks_per_node": 4}}, "no engine reads its weights"),
    "engines beside a gateway elsewhere": ({"gateway_url": "http://10.0.0.1:8400"}, "does nothing with --gateway"),
}


@pytest.mark.parametrize(("asked", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_work_is_refused(asked, reason):
    plan, _ = planned(**asked)
    assert any(re.search(reason, text) for text in plan.reasons), plan.reasons


def test_all_reasons_are_given_at_once():
    train = {**FITS["train"], "prefix_tree": True}
    plan, _ = planned(num_gpus=2, gib=8, sampling={"max_new_tokens": 9000}, model={"max_context": 9000}, train=train)
    assert len(plan.reasons) == 5


def test_on_a_cpu_nothing_is_said_of_gpus():
    plan, _ = planned(num_gpus=0, backend={"kind": "torch"}, train={})
    assert rows(plan, "machines") == {"1": "no GPU is used"}
    assert rows(plan, "memory of a process that trains")["in all"].endswith("GiB")
    assert plan.reasons == []


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_an_engine_holds_is_shown(kind):
    plan, _ = planned(backend=backend(engines={"kind": kind}))
    serving = rows(plan, "memory of a GPU that serves")
    assert serving["cache"].endswith("72 KiB a token")
    assert "of 8,192 tokens" in serving["sequences"]
