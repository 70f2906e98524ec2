"""Run agents for a gateway: on this machine, or as Jobs of Kubernetes clusters."""

import argparse
import socket
from pathlib import Path

from rich.console import Console

from manege.cli.arguments import add_gateway_arguments, connect
from manege.cli.parts import FolderLock
from manege.client import Client
from manege.config import ControllerConfig, SandboxConfig
from manege.controller.loop import Controller
from manege.controller.runner import Runner
from manege.errors import ConfigError
from manege.sandbox.probe import probe, require

EXAMPLES = """examples:
  manege controller --gateway http://127.0.0.1:8400 --key-file runs/gateway/operator.key
  manege controller --gateway http://127.0.0.1:8400 --key-file KEY --slots 8 --folder runs/agents
  manege controller --runner kubernetes --gateway http://10.0.0.5:8400 --key-file KEY --namespace agents --slots 200
"""

_KUBERNETES_LEASE_S = 120.0
"""Jobs go on without their controller, so there is time for it to be restarted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    add_gateway_arguments(parser)
    parser.add_argument("--slots", type=int, default=ControllerConfig().slots, help="attempts at once")
    parser.add_argument("--folder", type=Path, default=Path("runs/controller"), help="logs and workspaces")
    parser.add_argument("--name", help="who holds the leases; default: this machine and the folder, or `kubernetes`")
    parser.add_argument("--unsafe", action="store_true", help="run agents even where they cannot be isolated")
    parser.add_argument(
        "--runner", choices=["local", "kubernetes"], default="local", help="processes of this machine, or Jobs"
    )
    parser.add_argument(
        "--context", action="append", help="a cluster, by its context of the kubeconfig; again for several"
    )
    parser.add_argument("--namespace", action="append", help="where Jobs may be; again for several; default: context's")
    parser.add_argument("--jobs-per-minute", type=float, default=600, help="Jobs made at most (default: %(default)s)")


async def execute(arguments: argparse.Namespace) -> int:
    """Run until stopped; then all agents of this machine are killed and their rollouts go back to the queue, and Jobs
    go on."""
    if not arguments.gateway:
        raise ConfigError("--gateway URL is missing: a controller needs a gateway to take rollouts from")
    folder = arguments.folder.absolute()
    console = Console(stderr=True)
    async with connect(arguments) as client:
        await client.state()
        with FolderLock(folder):
            console.print(f"controller for {arguments.gateway}, {arguments.slots} slots", highlight=False)
            if arguments.runner == "kubernetes":
                controller = _of_clusters(arguments, client, folder)
            else:
                controller = _of_this_machine(arguments, client, folder, console)
            await controller.run()
    return 0


def _of_this_machine(arguments: argparse.Namespace, client: Client, folder: Path, console: Console) -> Controller:
    sandbox = SandboxConfig(unsafe=arguments.unsafe)
    for line in require(sandbox, probe()).missing():
        console.print(f"sandbox: {line}", highlight=False, soft_wrap=True)
    return Controller(
        client,
        name=arguments.name or f"{socket.gethostname()}-{folder.name}",
        folder=folder,
        config=ControllerConfig(slots=arguments.slots),
        sandbox=sandbox,
    )


def _of_clusters(arguments: argparse.Namespace, client: Client, folder: Path) -> Controller:
    name = arguments.name or "kubernetes"
    return Controller(
        client,
        name=name,
        folder=folder,
        config=ControllerConfig(slots=arguments.slots, lease_s=_KUBERNETES_LEASE_S),
        sandbox=SandboxConfig(unsafe=True),
        runner=_jobs(arguments, client, name, folder),
    )


def _jobs(arguments: argparse.Namespace, client: Client, name: str, folder: Path) -> Runner:
    try:
        from manege.controller.kubernetes.api import Api
        from manege.controller.kubernetes.runner import KubernetesRunner
    except ImportError as error:
        raise ConfigError(f"--runner kubernetes needs the extra k8s: pip install 'manege[k8s]' ({error})") from error
    if arguments.jobs_per_minute <= 0:
        raise ConfigError(f"--jobs-per-minute {arguments.jobs_per_minute:g} must be more than 0")
    return KubernetesRunner(
        client,
        name=name,
        folder=folder,
        apis=[Api.connect(context) for context in arguments.context or [None]],
        namespaces=arguments.namespace or (),
        jobs_per_minute=arguments.jobs_per_minute,
    )
