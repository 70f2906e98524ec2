"""Run agents on this machine for a gateway."""

import argparse
import socket
from pathlib import Path

from rich.console import Console

from manege.cli.arguments import add_gateway_arguments, connect
from manege.cli.parts import FolderLock
from manege.config import ControllerConfig, SandboxConfig
from manege.controller.loop import Controller
from manege.errors import ConfigError
from manege.sandbox.probe import probe, require

EXAMPLES = """examples:
  manege controller --gateway http://127.0.0.1:8400 --key-file runs/gateway/operator.key
  manege controller --gateway http://127.0.0.1:8400 --key-file KEY --slots 8 --folder runs/agents
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    add_gateway_arguments(parser)
    parser.add_argument("--slots", type=int, default=ControllerConfig().slots, help="attempts at once")
    parser.add_argument("--folder", type=Path, default=Path("runs/controller"), help="logs and workspaces")
    parser.add_argument("--unsafe", action="store_true", help="run agents even where they cannot be isolated")


async def execute(arguments: argparse.Namespace) -> int:
    """Run until stopped; then all agents are killed and their rollouts go back to the queue."""
    if not arguments.gateway:
        raise ConfigError("--gateway URL is missing: a controller needs a gateway to take rollouts from")
    sandbox = SandboxConfig(unsafe=arguments.unsafe)
    layers = require(sandbox, probe())
    folder = arguments.folder.absolute()
    console = Console(stderr=True)
    async with connect(arguments) as client:
        await client.state()
        with FolderLock(folder):
            console.print(f"controller for {arguments.gateway}, {arguments.slots} slots", highlight=False)
            for line in layers.missing():
                console.print(f"sandbox: {line}", highlight=False, soft_wrap=True)
            await Controller(
                client,
                name=f"{socket.gethostname()}-{folder.name}",
                folder=folder,
                config=ControllerConfig(slots=arguments.slots),
                sandbox=sandbox,
            ).run()
    return 0
