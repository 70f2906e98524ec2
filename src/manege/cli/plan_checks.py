"""Why a planned run cannot work: every reason, with the settings to change."""

from collections.abc import Iterator, Sequence

from manege.cli.planned import Planned, engine_gpus
from manege.cli.verl import NO_ENGINES, NO_VERL, has_verl
from manege.trainer.capabilities import incapable
from manege.trainer.engines.base import Capabilities
from manege.trainer.memory import GIB, LIBRARIES, engine_room, longest_sample

__all__ = ["check"]


def check(planned: Planned) -> Sequence[str]:
    """All reasons; empty: nothing speaks against it."""
    return [*_engine(planned), *_context(planned), *_places(planned), *_heads(planned), *_memory(planned)]


def _engine(planned: Planned) -> Iterator[str]:
    """What the train engine would say when it is made."""
    config, is_verl = planned.config, planned.config.backend.kind == "verl"
    can = Capabilities(
        prefix_tree=not is_verl,
        max_sample_tokens=planned.shape.context_limit,
        losses={config.credit.loss},
        reference=not (is_verl and config.backend.strategy == "megatron"),
        publishes="shared" if planned.ranks_serve else config.backend.weights,
    )
    yield from incapable(config, can)
    if is_verl and not (config.backend.engines.count or config.gateway.engine_url or planned.gateway_url):
        yield NO_ENGINES
    if is_verl and planned.machine.is_here and not has_verl():
        yield NO_VERL


def _context(planned: Planned) -> Iterator[str]:
    config = planned.config
    context = config.model.max_context or planned.shape.context_limit
    if config.sampling.max_new_tokens >= context:
        yield (
            f"sampling.max_new_tokens = {config.sampling.max_new_tokens} leaves no room for a prompt in a context of "
            f"{context}; lower it or raise model.max_context"
        )


def _places(planned: Planned) -> Iterator[str]:
    config, machine = planned.config, planned.machine
    backend, engines = config.backend, config.backend.engines
    if config.model.device == "cuda" and not machine.num_gpus:
        yield 'model.device = "cuda": there is no GPU here; --gpus N --gpu-memory GIB plans for another machine'
    if planned.gateway_url and engines.count:
        yield f"backend.engines.count = {engines.count} does nothing with --gateway: its engines are there"
    if not planned.on_gpu:
        if engines.kind == "sglang" and engines.count:
            yield 'backend.engines.kind = "sglang" needs GPUs; on a CPU there are "vllm" and "manege"'
        return
    used, shared = backend.ranks_per_node, engines.count * engines.tensor_parallel
    needed = max(used, shared) if backend.colocated else used + shared
    if needed > machine.num_gpus:
        both = "share" if backend.colocated else "and"
        yield (
            f"{needed} GPUs are needed, a machine has {machine.num_gpus}: backend.ranks_per_node = {used} {both} "
            f"backend.engines.count = {engines.count} x tensor_parallel = {engines.tensor_parallel}; lower one of them"
        )
    elif any(gpus.stop > machine.num_gpus for gpus in engine_gpus(planned)):
        last = max(gpus.stop for gpus in engine_gpus(planned)) - 1
        yield f"an engine would be placed on GPU {last}, a machine has {machine.num_gpus}; lower backend.engines.count"


def _heads(planned: Planned) -> Iterator[str]:
    shape, parts = planned.shape, planned.config.backend.engines.tensor_parallel
    if not planned.config.backend.engines.count or parts == 1:
        return
    if shape.num_heads % parts:
        yield (
            f"backend.engines.tensor_parallel = {parts} does not divide the model's {shape.num_heads} heads; "
            f"{_divisors(shape.num_heads)} do"
        )
    elif shape.num_kv_heads % parts and parts % shape.num_kv_heads:
        yield (
            f"backend.engines.tensor_parallel = {parts} and the model's {shape.num_kv_heads} heads of keys and values: "
            f"one must divide the other; {_divisors(shape.num_kv_heads)} do"
        )


def _memory(planned: Planned) -> Iterator[str]:
    config, machine, rank = planned.config, planned.machine, planned.rank.total
    backend = config.backend
    if not planned.on_gpu:
        needed = rank * backend.ranks_per_node
        if machine.memory_bytes is not None and needed > machine.memory_bytes:
            yield (
                f"{backend.ranks_per_node} ranks take {_gib(needed)}, this machine has {_gib(machine.memory_bytes)}; "
                f"{_smaller(planned)}"
            )
        return
    left = LIBRARIES if backend.colocated else 0
    beside = f" beside a sleeping engine ({_gib(left)})" if left else ""
    if rank + left > machine.gpu_bytes:
        yield f"a rank takes {_gib(rank)}{beside}, a GPU has {_gib(machine.gpu_bytes)}; {_smaller(planned)}"
    if not backend.engines.count or backend.engines.kind == "manege":
        return
    room = engine_room(backend, config.model, planned.shape, machine.gpu_bytes)
    if room.taken + left > machine.gpu_bytes:
        yield (
            f"an engine takes {_gib(room.taken)} beside an idle rank ({_gib(left)}), a GPU has "
            f"{_gib(machine.gpu_bytes)}; lower its share, backend.engines.options.gpu_memory_utilization (vllm) or "
            "mem_fraction_static (sglang)"
        )
    context = config.model.max_context or planned.shape.context_limit
    if not room.num_sequences(context):
        yield (
            f"an engine has {_gib(max(0, room.cache))} of a GPU for its cache, and one sequence of {context} tokens "
            f"takes {_gib(room.per_token * context + room.per_sequence)}; lower model.max_context or raise "
            "backend.engines.tensor_parallel"
        )


def _smaller(planned: Planned) -> str:
    """What helps most."""
    config, longest = planned.config, longest_sample(planned.config, planned.shape)
    hints = []
    if longest >= config.train.micro_batch_tokens:
        hints.append(f"bound the longest sample ({longest} tokens) by train.max_sample_tokens or model.max_context")
    else:
        hints.append(f"lower train.micro_batch_tokens = {config.train.micro_batch_tokens}")
    if not config.train.gradient_checkpointing:
        hints.append("set train.gradient_checkpointing")
    if config.backend.kind == "torch" and not config.train.lora_rank:
        hints.append("train adapters (train.lora_rank)")
    hints.append("have more ranks" if config.backend.kind == "verl" else 'divide the model (backend.kind = "verl")')
    return ", or ".join(hints)


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
