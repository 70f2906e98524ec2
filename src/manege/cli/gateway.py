"""Serve the agents' model endpoint and the rollout API: over a local model, engines elsewhere, or bare.

Bare (`--engine none`), it waits for engines that register themselves with POST /api/models, as Agent Lightning's
trainer does; `--model` may then be a mere name. With `--workers N` it is N processes behind one port.
"""

import argparse
import asyncio
import gc
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import get_args

from rich.console import Console

from manege.cli.parts import FolderLock, gateway_serving, local_engine, upstream_engines
from manege.config import EngineConfig, GatewayConfig, ModelConfig
from manege.engine.base import Engine
from manege.errors import ConfigError, ModelError
from manege.gateway.auth import operator_key
from manege.gateway.given import Given, Post
from manege.gateway.server import check_host
from manege.gateway.workers import Workers
from manege.model.folder import ModelFolder, open_folder
from manege.store.dialect import database_of
from manege.types import EngineWire

EXAMPLES = """examples:
  manege gateway --model smollm2 --port 8400 --folder runs/gateway
  manege gateway --model FOLDER --engine http://127.0.0.1:8000 --port 8400 --folder runs/gateway
  manege gateway --model FOLDER --engine URL --operator-key KEY --store postgresql://manege@db/manege --workers 4
  manege gateway --model Qwen/Qwen3-4B --engine none --host 0.0.0.0 --port 8400 --operator-key KEY
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("--model", default=ModelConfig().path, help="model folder or name (default: %(default)s)")
    parser.add_argument(
        "--engine",
        metavar="URL",
        action="append",
        help="an engine that takes token ids (again for several), or none; default: local",
    )
    parser.add_argument(
        "--engine-wire",
        choices=get_args(EngineWire),
        default=GatewayConfig().engine_wire,
        help="how it takes them (default: %(default)s, which `manege engine` speaks too)",
    )
    parser.add_argument("--host", default=GatewayConfig().host, help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8400, help="port to bind, 0: any (default: %(default)s)")
    parser.add_argument("--operator-key", metavar="KEY", help="default: made once, kept in FOLDER/operator.key")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/gateway"), help="store and key (default: %(default)s)"
    )
    parser.add_argument("--store", metavar="URL", help="a path, or postgresql://user@host/name, which gateways share")
    parser.add_argument(
        "--workers",
        metavar="N",
        type=int,
        default=1,
        help="processes that serve behind the port, over PostgreSQL and engines elsewhere (default: %(default)s)",
    )
    # What the first process tells a worker.
    parser.add_argument("--post", help=argparse.SUPPRESS)


async def execute(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    data = arguments.folder.absolute()
    config = GatewayConfig(host=arguments.host, port=arguments.port, key=arguments.operator_key, store=arguments.store)
    if arguments.post is not None:
        return await _work(arguments, config, data, Given(Post.loaded(arguments.post)))
    if arguments.workers < 1:
        raise ConfigError(f"--workers {arguments.workers} must be at least 1")
    with FolderLock(data):
        if arguments.workers > 1:
            return await _lead(arguments, config, data)
        return await _work(arguments, config, data, None)


async def _work(arguments: argparse.Namespace, config: GatewayConfig, data: Path, given: Given | None) -> int:
    """The gateway, or one worker of it."""
    # A file per connection of an agent: as many as the machine allows.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # macOS allows fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder, engines = await _engines(arguments)
    try:
        async with gateway_serving(config, folder, engines, data, max_context=None, given=given) as server:
            if given is None:
                name = folder if isinstance(folder, str) else folder.path.name
                _say(f"gateway {server.url}, model {name}, store {server.store}")
            # What was loaded so far lives as long as the process; the collector need not look at it again.
            gc.freeze()
            gc.set_threshold(20_000, 20, 20)
            await (asyncio.get_running_loop().create_future() if given is None else given.ended())
    finally:
        for engine in engines.values():
            await engine.close()
    return 0


async def _lead(arguments: argparse.Namespace, config: GatewayConfig, data: Path) -> int:
    """Several workers, each as `_work` of the same command line with its post."""
    number = arguments.workers
    if arguments.engine is None:
        raise ConfigError(
            f"--workers {number} needs engines elsewhere: a local one would be loaded by each worker, and learn of no "
            "other's weights; start it with `manege engine` and name it with --engine URL"
        )
    database = database_of(config.store or data / "manege.db")
    if not database.is_shared:
        raise ConfigError(
            f"--workers {number} needs a database that several processes may write to, which {database.name} is not; "
            "give --store postgresql://user@host/name"
        )
    check_host(config.host, has_explicit_key=config.key is not None)
    # Before all workers ask for it.
    operator_key(data)
    workers = Workers(lambda post: _command(arguments, data, post), number=number, host=config.host, port=config.port)
    await workers.run(
        lambda: _say(f"gateway {workers.url}, model {arguments.model}, store {database.name}, {number} workers")
    )
    return 0


def _command(arguments: argparse.Namespace, data: Path, post: Post) -> list[str]:
    """Of a worker: what its gateway was started with, but for the port."""
    words = ["--model", arguments.model, "--folder", str(data), "--store", arguments.store, "--post", post.dumped()]
    words += ["--engine-wire", arguments.engine_wire]
    for engine in arguments.engine:
        words += ["--engine", engine]
    if arguments.operator_key is not None:
        words += ["--operator-key", arguments.operator_key]
    if arguments.verbose:
        words.append("--verbose")
    return [sys.executable, "-c", "import sys; from manege.cli import main; sys.exit(main())", "gateway", *words]


def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


async def _engines(arguments: argparse.Namespace) -> tuple[ModelFolder | str, Mapping[str, Engine]]:
    """The model and what serves it; a name without a folder is enough where nothing is tokenised here."""
    if arguments.engine is None:
        model = ModelConfig(path=arguments.model)
        folder, engine = await asyncio.to_thread(local_engine, model, EngineConfig(), seed=0)
        return folder, {"local": engine}
    if arguments.engine != ["none"]:
        return open_folder(arguments.model), upstream_engines(arguments.engine, arguments.engine_wire)
    try:
        return open_folder(arguments.model), {}
    except ModelError:
        return arguments.model, {}
