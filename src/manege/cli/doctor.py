"""What this machine can do, and what is missing, one line each; exit code 1 when training cannot start.

With `--runner kubernetes`: what a controller may do in a cluster, and whether an attempt's pod works there. With
`--engine URL`: what a server can do, the mode that follows, and what would make it do more; exit code 1 for no mode.
"""

import argparse
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from manege.config import ModelConfig, load_config
from manege.engine.examining.examine import Finding, examine
from manege.errors import ConfigError, ModelError
from manege.model.folder import open_folder
from manege.sandbox.probe import probe

EXAMPLES = """examples:
  manege doctor
  manege doctor --model FOLDER
  manege doctor --engine http://127.0.0.1:8000 --model FOLDER
  manege doctor --runner kubernetes --context CLUSTER --namespace agents
  manege doctor --runner kubernetes --run run.toml --gateway http://10.0.0.5:8400
"""

_NEEDED_BYTES = 4 << 30
"""Model, two checkpoints with optimiser state, and the exported model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("--model", help=f"model folder or name (default: {ModelConfig().path}; of an engine: unknown)")
    parser.add_argument("--engine", metavar="URL", help="a server that samples: what it can do; its weights stay")
    parser.add_argument("--runner", choices=["local", "kubernetes"], default="local", help="what shall run the agents")
    parser.add_argument("--run", type=Path, metavar="RUN_FILE", help="kubernetes: try what this run's attempts need")
    parser.add_argument("--gateway", metavar="URL", help="kubernetes: as the controller reaches it")
    parser.add_argument("--context", action="append", help="kubernetes: a cluster of the kubeconfig; again for several")
    parser.add_argument("--namespace", action="append", help="kubernetes: as for the controller; again for several")


async def execute(arguments: argparse.Namespace) -> int:
    """Check and report."""
    console = Console()
    good = True

    def report(ok: bool | None, text: str) -> None:
        nonlocal good
        good &= ok is not False
        word = "unknown" if ok is None else "ok" if ok else "missing"
        console.print(f"{word:8} {text}", highlight=False, soft_wrap=True)

    if arguments.engine is not None:
        return await _engine(arguments, console, report)
    if arguments.runner == "kubernetes":
        await _clusters(arguments, report)
    else:
        _machine(arguments, console, report)
    return 0 if good else 1


async def _engine(arguments: argparse.Namespace, console: Console, report: Callable[[bool | None, str], None]) -> int:
    folder = None if arguments.model is None else open_folder(arguments.model)
    async for found in examine(arguments.engine, folder):
        if isinstance(found, Finding):
            report(found.ok, found.text)
            continue
        report(found.mode is not None, str(found))
        for option in found.options:
            console.print(f"add      {option}", highlight=False, soft_wrap=True)
        return 0 if found.mode is not None else 1
    raise AssertionError("an examination ends with a verdict")


async def _clusters(arguments: argparse.Namespace, report: Callable[[bool | None, str], None]) -> None:
    try:
        from manege.controller.kubernetes.api import Api
        from manege.controller.kubernetes.doctor import examine
    except ImportError as error:
        raise ConfigError(f"--runner kubernetes needs the extra k8s: pip install 'manege[k8s]' ({error})") from error
    config = None if arguments.run is None else load_config(arguments.run, [])
    for context in arguments.context or [None]:
        api = Api.connect(context)
        try:
            for namespace in arguments.namespace or [api.namespace]:
                async for finding in examine(api, namespace, config=config, gateway_url=arguments.gateway):
                    report(finding.ok, finding.text)
        finally:
            await api.aclose()


def _machine(arguments: argparse.Namespace, console: Console, report: Callable[[bool | None, str], None]) -> None:
    report(sys.version_info >= (3, 11), f"Python {platform.python_version()} (3.11 or newer)")
    report(True, f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for package in ("torch", "safetensors", "matplotlib", "openai"):
        found = importlib.util.find_spec(package) is not None
        report(found, f"package {package}" + ("" if found else ": pip install 'manege[train]'"))
    model = arguments.model or ModelConfig().path
    try:
        folder = open_folder(model)
        report(True, f"model {model}: {folder.path}, {folder.context_limit} tokens of context")
    except ModelError as error:
        report(False, f"model {model}: {error}")
    layers = probe()
    console.print(f"sandbox  {', '.join(layers.names())}", highlight=False, soft_wrap=True)
    for line in layers.missing():
        console.print(f"sandbox  {line}", highlight=False, soft_wrap=True)
    report(
        layers.isolates,
        "agents can be isolated (Landlock and seccomp)" + ("" if layers.isolates else "; else --unsafe"),
    )
    free = shutil.disk_usage(Path.cwd()).free
    report(free > _NEEDED_BYTES, f"{free >> 30} GiB of disk free here (4 needed)")
