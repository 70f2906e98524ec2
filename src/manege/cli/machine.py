"""The machine that a plan is for: this one, or one that is described."""

import argparse
import os
import subprocess
from dataclasses import dataclass

from manege.errors import ConfigError
from manege.trainer.memory import GIB

__all__ = ["Machine", "add_machine_arguments", "machine_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One of those that train; all are alike."""

    num_gpus: int
    gpu_bytes: int
    """Of the smallest one."""
    is_here: bool
    """It is this one, and what a run needs can be looked for."""
    memory_bytes: int | None
    """Of the machine itself; None: unknown."""


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the machine to plan for."""
    parser.add_argument("--gpus", type=int, metavar="N", help="--dry-run: plan for machines with N GPUs (0: none) each")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="--dry-run: memory of each GPU")


def machine_of(arguments: argparse.Namespace) -> Machine:
    """As the arguments say, else as it is found. Raises ConfigError for arguments that do not go together."""
    if arguments.gpus is None and arguments.gpu_memory is None:
        sizes = _gpus_here()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Machine(num_gpus=len(sizes), gpu_bytes=min(sizes, default=0), is_here=True, memory_bytes=memory)
    if not arguments.gpus and arguments.gpu_memory is None:
        return Machine(num_gpus=0, gpu_bytes=0, is_here=False, memory_bytes=None)
    if arguments.gpus is None or arguments.gpu_memory is None or arguments.gpus < 0 or arguments.gpu_memory <= 0:
        raise ConfigError(
            f"--gpus {arguments.gpus} --gpu-memory {arguments.gpu_memory}: a machine with GPUs has both, for example "
            "--gpus 8 --gpu-memory 80"
        )
    size = int(arguments.gpu_memory * GIB)
    return Machine(num_gpus=arguments.gpus, gpu_bytes=size, is_here=False, memory_bytes=None)


def _gpus_here() -> list[int]:
    """Bytes of each. Asked of the driver's own program: torch would take seconds and memory of the GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) << 20 for line in done.stdout.split()]
