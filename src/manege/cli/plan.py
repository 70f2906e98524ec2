"""What a run would start, where, and with how much memory: `manege train RUN --dry-run`.

Nothing is started and no weights are loaded. Command lines and settings of engines are made by the functions that start
them; memory is reckoned from the model's config.json (`trainer.memory`). What cannot work is in `reasons`, all of it.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manege.cli.machine import Machine
from manege.cli.plan_checks import check
from manege.cli.planned import Planned, engine_gpus
from manege.cli.services import service_command
from manege.config import RunConfig
from manege.engine.commands import PACKAGES, server_command, server_environment, server_package
from manege.errors import ConfigError
from manege.model.shape import ModelShape, shape_of
from manege.trainer.engines.verl.keys import worker_keys
from manege.trainer.memory import GIB, engine_room, longest_sample

__all__ = ["Plan", "make_plan"]

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """For people."""

    sections: Sequence[tuple[str, Rows]]
    reasons: Sequence[str]
    """Why it cannot work; empty: nothing speaks against it."""


def make_plan(
    config: RunConfig,
    model_config: Mapping[str, Any],
    folder: Path,
    machine: Machine,
    *,
    gateway_url: str | None = None,
    num_tasks: int | None = None,
) -> Plan:
    """`model_config`: config.json of the model in `folder`. Raises ModelError for one whose size is not known."""
    planned = Planned(
        config=config,
        folder=folder,
        shape=shape_of(model_config),
        machine=machine,
        gateway_url=gateway_url,
        num_tasks=num_tasks,
    )
    engines, reasons = _engine_rows(planned)
    ranks, more = _verl_rows(planned)
    sections = [
        ("model", _model(planned)),
        ("batch", list(_batch(planned))),
        ("machines", list(_machines(planned))),
        ("processes", [*_processes(planned), *engines]),
        *([("verl, in each rank", ranks)] if ranks else []),
        *_memory(planned),
    ]
    return Plan(sections=sections, reasons=[*check(planned), *reasons, *more])


def _model(planned: Planned) -> Rows:
    shape, model = planned.shape, planned.config.model
    vision = sum(1 for name in shape.parameters if ".visual." in name)
    rows = [
        (model.path, f"{shape.model_type}, {shape.num_parameters:,} parameters" + (", vision included" * bool(vision))),
        ("layers", _layers(shape)),
        ("context", f"{model.max_context or shape.context_limit:,} tokens; made for {shape.context_limit:,}"),
    ]
    train = planned.config.train
    if train.lora_rank:
        count = shape.num_adapter_parameters(train.lora_rank, tuple(train.lora_targets))
        rows.append(("adapters", f"rank {train.lora_rank}: {count:,} parameters"))
    elif train.frozen:
        rows.append(("trained", f"{shape.num_trained(tuple(train.frozen)):,} parameters; frozen: {train.frozen}"))
    return rows


def _layers(shape: ModelShape) -> str:
    linear = shape.num_layers - shape.num_attention_layers
    kinds = f" ({linear} with linear attention)" if linear else ""
    heads = f"{shape.num_heads} heads, {shape.num_kv_heads} of keys and values, of {shape.head_dim}"
    return f"{shape.num_layers}{kinds}, width {shape.width:,}, {heads}; vocabulary {shape.vocab_size:,}"


def _batch(planned: Planned) -> Iterator[tuple[str, str]]:
    config, train = planned.config, planned.config.train
    num_rollouts, num_ranks = train.groups * train.group_size, config.backend.num_ranks
    yield "a step", f"{train.groups} groups x {train.group_size} = {num_rollouts} rollouts"
    steps = f"{_count(train.mini_batches, 'step')} of {num_rollouts / train.mini_batches:g} rollouts"
    ranks = f", divided among {num_ranks} ranks" if num_ranks > 1 else ""
    yield "optimiser", f"{steps}{ranks}"
    active = train.active_groups * train.group_size
    slots = config.controller.slots
    waiting = f"; {active - slots} of them wait for a slot" if active > slots else ""
    yield "under way", f"{train.active_groups} groups = {active} rollouts, {slots} agents at once{waiting}"
    epochs = ""
    if planned.num_tasks:
        epochs = f", {train.steps * train.groups / planned.num_tasks:.2f} passes over {planned.num_tasks:,} tasks"
    yield "the run", f"{train.steps} steps = {train.steps * num_rollouts:,} rollouts{epochs}"
    longest = longest_sample(config, planned.shape)
    yield (
        "tokens",
        f"answers of {config.sampling.max_new_tokens:,}, samples of {longest:,} at most; "
        f"{max(train.micro_batch_tokens, longest):,} per forward and backward pass",
    )


def _machines(planned: Planned) -> Iterator[tuple[str, str]]:
    backend, machine = planned.config.backend, planned.machine
    if not planned.on_gpu:
        yield "1" if backend.nodes == 1 else f"1 to {backend.nodes}", "no GPU is used"
        return
    for node in range(backend.nodes):
        first = node * backend.ranks_per_node
        used = [f"GPU {gpu}: rank {first + gpu}" for gpu in range(backend.ranks_per_node)]
        if node == 0:
            used += [f"{_gpus(range_)}: engine {index}" for index, range_ in enumerate(engine_gpus(planned))]
        size = f"{machine.gpu_bytes / GIB:.0f} GiB"
        yield f"{node + 1}", f"{machine.num_gpus} GPUs of {size}; {'; '.join(used)}"


def _gpus(gpus: range) -> str:
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]}-{gpus[-1]}"


def _processes(planned: Planned) -> Iterator[tuple[str, str]]:
    config, backend = planned.config, planned.config.backend
    if planned.gateway_url:
        yield "elsewhere", f"gateway {planned.gateway_url}, with its engines; a controller beside it"
    port = "a free port" if config.gateway.port == 0 else str(config.gateway.port)
    parts = [] if planned.gateway_url else [f"gateway ({config.gateway.host}, {port})", "controller"]
    parts.append("trainer")
    if backend.kind == "torch":
        parts.append("rank 0 and its engine" if planned.ranks_serve else "rank 0")
    yield "manege train", ", ".join(parts)
    if not planned.gateway_url:
        yield "agents", f"{config.controller.slots} at once at most, as processes of this machine"
    for name, service in config.services.items():
        yield f"service {name}", service.url or shlex.join(service_command(config, service))
    if backend.kind == "torch" and backend.num_ranks > 1:
        serving = ", also an engine on a free port of 127.0.0.1" if planned.ranks_serve else ""
        each = f"ranks 1-{backend.num_ranks - 1}" if backend.num_ranks > 2 else "rank 1"
        yield each, f"a process of its own{serving}"
    if backend.kind == "verl":
        place = backend.ray_address or "started on this machine for the run"
        yield "Ray", place
        yield f"ranks 0-{backend.num_ranks - 1}", f"workers of Ray, verl with {backend.strategy}"
    if urls := config.gateway.engine_url:
        yield "engines elsewhere", urls if isinstance(urls, str) else ", ".join(urls)


def _engine_rows(planned: Planned) -> tuple[Rows, Sequence[str]]:
    """Their command lines, as they will be typed; and why one cannot be."""
    backend, model = planned.config.backend, planned.config.model
    if not backend.engines.count:
        return [], []
    rows: list[tuple[str, str]] = []
    try:
        package = server_package(backend.engines) if planned.machine.is_here else PACKAGES[backend.engines.kind][0]
        for index in range(backend.engines.count):
            command = list(server_command(backend, model, planned.folder, port=0, package=package))
            command[command.index("--port") + 1] = "PORT"
            environment = server_environment(backend, model, index, package=package, gpus=planned.on_gpu)
            settings = [f"{key}={value}" for key, value in environment.items()]
            rows.append((f"engine {index}", shlex.join([*settings, *command])))
    except ConfigError as error:
        return rows, [str(error)]
    return rows, []


def _verl_rows(planned: Planned) -> tuple[Rows, Sequence[str]]:
    """What verl's workers are told, and why it cannot be."""
    if planned.config.backend.kind != "verl":
        return [], []
    try:
        keys = worker_keys(planned.config, planned.folder, cpu=not planned.on_gpu)
    except ConfigError as error:
        return [], [str(error)]
    return [(f"{section}.{key}", str(value)) for section, values in keys.items() for key, value in values.items()], []


def _memory(planned: Planned) -> Iterator[tuple[str, Rows]]:
    config, machine = planned.config, planned.machine
    backend = config.backend
    where = "GPU" if planned.on_gpu else "process"
    rank = [(name, _size(size)) for name, size in planned.rank.parts.items() if size]
    yield f"memory of a {where} that trains", [*rank, ("in all", _size(planned.rank.total))]
    if not backend.engines.count or not planned.on_gpu or backend.engines.kind == "manege":
        return
    room = engine_room(backend, config.model, planned.shape, machine.gpu_bytes)
    longest = config.model.max_context or planned.shape.context_limit
    rows = [
        ("takes", _size(room.taken)),
        ("weights", _size(room.weights)),
        ("its own work, about", _size(room.taken - room.weights - room.cache)),
        ("cache", f"{_size(room.cache)}; {room.per_token / 1024:g} KiB a token" + _states(room.per_sequence)),
        (
            "sequences",
            f"{room.num_sequences(longest):,} of {longest:,} tokens, "
            f"{backend.engines.count * room.num_sequences(longest):,} on {_count(backend.engines.count, 'engine')}",
        ),
    ]
    yield "memory of a GPU that serves", rows
    if backend.colocated:
        state = planned.rank.state * backend.ranks_per_node
        yield "memory of the machine", [("ranks, while the engines work", _size(state))]


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + "s" * (number != 1)


def _states(per_sequence: int) -> str:
    return f", {per_sequence / 2**20:.1f} MiB a sequence" if per_sequence else ""


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB / 100 else f"{num_bytes / 2**20:.2f} MiB"
