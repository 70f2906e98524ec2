"""Serve the agents' model endpoint and the rollout API: over a local model, engines elsewhere, or bare.

Bare (`--engine none`), it waits for engines that register themselves with POST /api/models, as Agent Lightning's
trainer does; `--model` may then be a mere name.
"""

import argparse
import asyncio
import gc
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from manege.cli.parts import FolderLock, gateway_serving, local_engine, upstream_engines
from manege.config import EngineConfig, GatewayConfig, ModelConfig
from manege.engine.base import Engine
from manege.errors import ModelError
from manege.model.folder import ModelFolder, open_folder

EXAMPLES = """examples:
  manege gateway --model smollm2 --port 8400 --folder runs/gateway
  manege gateway --model FOLDER --engine http://127.0.0.1:8000 --port 8400 --folder runs/gateway
  manege gateway --model FOLDER --engine URL --operator-key KEY --store postgresql://manege@db/manege
  manege gateway --model Qwen/Qwen3-4B --engine none --host 0.0.0.0 --port 8400 --operator-key KEY
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("--model", default=ModelConfig().path, help="model folder or name (default: %(default)s)")
    parser.add_argument(
        "--engine",
        metavar="URL",
        action="append",
        help="an engine that speaks vLLM's token wire (again for several), or none; default: local",
    )
    parser.add_argument("--host", default=GatewayConfig().host, help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8400, help="port to bind, 0: any (default: %(default)s)")
    parser.add_argument("--operator-key", metavar="KEY", help="default: made once, kept in FOLDER/operator.key")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/gateway"), help="store and key (default: %(default)s)"
    )
    parser.add_argument("--store", metavar="URL", help="a path, or postgresql://user@host/name, which gateways share")


async def execute(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    data = arguments.folder.absolute()
    config = GatewayConfig(host=arguments.host, port=arguments.port, key=arguments.operator_key, store=arguments.store)
    with FolderLock(data):
        folder, engines = await _engines(arguments)
        try:
            async with gateway_serving(config, folder, engines, data, max_context=None) as server:
                console = Console(stderr=True)
                name = folder if isinstance(folder, str) else folder.path.name
                console.print(
                    f"gateway {server.url}, model {name}, store {server.store}", highlight=False, soft_wrap=True
                )
                # What was loaded so far lives as long as the process; the collector need not look at it again.
                gc.freeze()
                gc.set_threshold(20_000, 20, 20)
                await asyncio.get_running_loop().create_future()
        finally:
            for engine in engines.values():
                await engine.close()
    return 0


async def _engines(arguments: argparse.Namespace) -> tuple[ModelFolder | str, Mapping[str, Engine]]:
    """The model and what serves it; a name without a folder is enough where nothing is tokenised here."""
    if arguments.engine is None:
        model = ModelConfig(path=arguments.model)
        folder, engine = await asyncio.to_thread(local_engine, model, EngineConfig(), seed=0)
        return folder, {"local": engine}
    if arguments.engine != ["none"]:
        return open_folder(arguments.model), upstream_engines(arguments.engine)
    try:
        return open_folder(arguments.model), {}
    except ModelError:
        return arguments.model, {}
