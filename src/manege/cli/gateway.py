"""Serve the agents' model endpoint and the rollout API, over a local model or an engine elsewhere."""

import argparse
import asyncio
from pathlib import Path

from rich.console import Console

from manege.cli.parts import FolderLock, gateway_serving, local_engine
from manege.config import EngineConfig, GatewayConfig, ModelConfig
from manege.engine.upstream import UpstreamEngine
from manege.model.folder import open_folder

EXAMPLES = """examples:
  manege gateway --model smollm2 --port 8400 --folder runs/gateway
  manege gateway --model FOLDER --engine http://127.0.0.1:8000 --port 8400 --folder runs/gateway
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("--model", default=ModelConfig().path, help="model folder or name (default: %(default)s)")
    parser.add_argument("--engine", metavar="URL", help="an engine that speaks vLLM's token wire; default: local")
    parser.add_argument("--host", default=GatewayConfig().host, help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8400, help="port to bind, 0: any (default: %(default)s)")
    parser.add_argument("--key", help="operator key; default: made once, kept in FOLDER/operator.key")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/gateway"), help="store and key (default: %(default)s)"
    )


async def execute(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    data = arguments.folder.absolute()
    config = GatewayConfig(host=arguments.host, port=arguments.port, key=arguments.key)
    with FolderLock(data):
        if arguments.engine:
            folder, engine = open_folder(arguments.model), UpstreamEngine(arguments.engine)
        else:
            folder, engine = await asyncio.to_thread(
                local_engine, ModelConfig(path=arguments.model), EngineConfig(), seed=0
            )
        try:
            async with gateway_serving(config, folder, engine, data, max_context=None) as server:
                console = Console(stderr=True)
                console.print(
                    f"gateway {server.url}, model {folder.path.name}, store {data}", highlight=False, soft_wrap=True
                )
                await asyncio.get_running_loop().create_future()
        finally:
            await engine.close()
    return 0
