"""Serve a model folder on vLLM's token wire: token ids in, token ids and log-probabilities out."""

import argparse
import asyncio

from rich.console import Console

from manege.cli.parts import local_engine
from manege.config import EngineConfig, GatewayConfig, ModelConfig
from manege.engine.server import engine_app
from manege.errors import ConfigError
from manege.gateway.server import LOOPBACK, Server
from manege.rendering.select import renderer_for

EXAMPLES = """examples:
  manege engine --model smollm2 --port 8000
  manege engine --model runs/finder/model --port 8000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("--model", default=ModelConfig().path, help="model folder or name (default: %(default)s)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="default: %(default)s")
    parser.add_argument("--host", default=GatewayConfig().host, help="address to bind (default: %(default)s)")
    parser.add_argument("--expose", action="store_true", help="accept an address that can be reached from outside")
    parser.add_argument("--port", type=int, default=8000, help="port to bind, 0: any (default: %(default)s)")


async def execute(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    if arguments.host not in LOOPBACK and not arguments.expose:
        raise ConfigError(
            f"--host {arguments.host}: the token wire has no key, and its callers can change the weights; "
            "bind 127.0.0.1, or say --expose where only the gateway reaches it"
        )
    model = ModelConfig(path=arguments.model, device=arguments.device)
    folder, engine = await asyncio.to_thread(local_engine, model, EngineConfig(), seed=0)
    try:
        renderer = renderer_for(folder)
        app = engine_app(engine, encode=renderer.encode, decode=renderer.decode)
        async with Server(app, host=arguments.host, port=arguments.port, has_explicit_key=True) as server:
            Console(stderr=True).print(f"engine {server.url}, model {folder.path.name}", highlight=False)
            await asyncio.get_running_loop().create_future()
    finally:
        await engine.close()
    return 0
