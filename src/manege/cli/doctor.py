"""What this machine can do, and what is missing, one line each; exit code 1 when training cannot start."""

import argparse
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

from rich.console import Console

from manege.config import ModelConfig
from manege.errors import ModelError
from manege.model.folder import open_folder
from manege.sandbox.probe import probe

EXAMPLES = """examples:
  manege doctor
  manege doctor --model FOLDER
"""

_NEEDED_BYTES = 4 << 30
"""Model, two checkpoints with optimiser state, and the exported model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("--model", default=ModelConfig().path, help="model folder or name (default: %(default)s)")


async def execute(arguments: argparse.Namespace) -> int:
    """Check and report."""
    console = Console()
    good = True

    def report(ok: bool, text: str) -> None:
        nonlocal good
        good &= ok
        console.print(("ok       " if ok else "missing  ") + text, highlight=False, soft_wrap=True)

    report(sys.version_info >= (3, 11), f"Python {platform.python_version()} (3.11 or newer)")
    report(True, f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for package in ("torch", "safetensors", "matplotlib", "openai"):
        found = importlib.util.find_spec(package) is not None
        report(found, f"package {package}" + ("" if found else ": pip install 'manege[train]'"))
    try:
        folder = open_folder(arguments.model)
        report(True, f"model {arguments.model}: {folder.path}, {folder.context_limit} tokens of context")
    except ModelError as error:
        report(False, f"model {arguments.model}: {error}")
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
    return 0 if good else 1
