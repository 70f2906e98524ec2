"""The parts of manege, wired together in one process: store, engine, renderer, gateway, controller, train engine."""

import asyncio
import fcntl
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.console import Console

from manege.cli.ranks import Ranks, other_ranks
from manege.cli.services import refuse_services, services_started
from manege.cli.verl import verl_engine
from manege.client import Client
from manege.config import EngineConfig, GatewayConfig, ModelConfig, RunConfig
from manege.controller.environment import fill
from manege.controller.launch import task_text
from manege.controller.loop import Controller
from manege.engine.base import Engine
from manege.engine.launch import engine_servers
from manege.engine.threads import calm_threads
from manege.engine.wires import token_engine
from manege.errors import ConfigError, ManegeError
from manege.gateway.app import create_app
from manege.gateway.auth import operator_key
from manege.gateway.given import Given
from manege.gateway.server import GatewayServer
from manege.logs import get_logger, kv
from manege.model.folder import ModelFolder, open_folder
from manege.rendering.select import renderer_for
from manege.sandbox.launcher import search_path
from manege.sandbox.probe import probe, require
from manege.store.sql import SqlStore
from manege.trainer.engines.base import TrainEngine
from manege.types import EngineWire, Task

__all__ = [
    "FolderLock",
    "Parts",
    "check_agents",
    "controlling",
    "gateway_serving",
    "load",
    "local_engine",
    "served",
    "serving",
    "train_engine_alone",
    "upstream_engines",
]


if TYPE_CHECKING:
    from manege.engine.weight_sender import WeightSender
    from manege.model.base import LanguageModel

_log = get_logger("cli")


class FolderLock:
    """One process per run folder; the lock dies with its holder, however that dies."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
        except OSError as error:
            raise ConfigError(f"run folder {self._path.parent} cannot be written: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(
                f"run folder {self._path.parent} is in use by another manege process; "
                "wait for it, stop it, or choose another folder with folder=..."
            ) from error

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a verb works with."""

    client: Client
    train_engine: TrainEngine | None
    folder: ModelFolder


def check_agents(config: RunConfig, tasks: Sequence[Task], console: Console) -> None:
    """Refuse an environment that the tasks do not fill, and machines that cannot isolate agents; say what they lack."""
    for line in require(config.sandbox, probe()).missing():
        console.print(f"sandbox: {line}", highlight=False, soft_wrap=True)
    for name, template in config.agent.env.items():
        fill(template, tasks[0].input, name=name, path=search_path())
    if config.agent.harness is not None:
        task_text(config.agent, tasks[0].input)


@asynccontextmanager
async def serving(config: RunConfig, *, train: bool, terminal: str | None = None) -> AsyncIterator[Parts]:
    """Everything in this process, for as long as the context lasts; a part that fails ends it with its error."""
    async with AsyncExitStack() as stack:
        model_folder = open_folder(config.model.path)
        await stack.enter_async_context(services_started(config))
        urls = await stack.enter_async_context(
            engine_servers(config.backend, config.model, model_folder.path, config.run_folder / "engines")
        )
        ranks = None
        if train:
            serves = not (urls or config.gateway.engine_url)
            ranks = await stack.enter_async_context(other_ranks(config, serves=serves))
        verl = None
        if train:
            has_engines = bool(urls or config.gateway.engine_url)
            verl = await stack.enter_async_context(verl_engine(config, model_folder, has_engines=has_engines))
        sender = stack.enter_context(_weight_sender(config, train))
        engines, train_engine = await asyncio.to_thread(
            _engines, config, model_folder, train and not verl, urls, ranks, sender
        )
        for engine in engines.values():
            stack.push_async_callback(engine.close)
        server = await stack.enter_async_context(
            gateway_serving(
                config.gateway, model_folder, engines, config.run_folder, max_context=config.model.max_context
            )
        )
        client = await stack.enter_async_context(Client(server.url, server.key))
        # Who paused it may have died with the trainer that was in this process.
        await client.resume()
        await stack.enter_async_context(controlling(client, config, terminal=terminal))
        yield Parts(client=client, train_engine=verl or train_engine, folder=model_folder)


def local_engine(model: ModelConfig, config: EngineConfig, *, seed: int) -> tuple[ModelFolder, Engine]:
    """A model folder and the engine that serves it, without a trainer."""
    folder = open_folder(model.path)
    return folder, served(load(model, folder), folder, model, config, seed=seed)


def upstream_engines(
    urls: str | Sequence[str], wire: EngineWire = "vllm", *, sleeps: bool = False, fetches: bool = False
) -> Mapping[str, Engine]:
    """Engines elsewhere, by their addresses. `sleeps`: they share GPUs with what trains; `fetches`: they get weights
    from its memory."""
    return {url: token_engine(url, wire, sleeps=sleeps, fetches=fetches) for url in _listed(urls)}


def _listed(urls: str | Sequence[str] | None) -> Sequence[str]:
    return [urls] if isinstance(urls, str) else urls or ()


def _engines(
    config: RunConfig,
    folder: ModelFolder,
    train: bool,
    started: Sequence[str],
    ranks: Ranks | None,
    sender: "WeightSender | None",
) -> tuple[Mapping[str, Engine], TrainEngine | None]:
    """The engines and, over the same weights unless they are elsewhere, the train engine. `started`: by the run."""
    backend, kind = config.backend, config.backend.engines.kind
    wire: EngineWire = "sglang" if kind == "sglang" else "vllm"
    sleeps, fetches = backend.colocated and kind == "vllm", backend.weights == "transfer"
    named = upstream_engines(_listed(config.gateway.engine_url), config.gateway.engine_wire)
    if elsewhere := {**upstream_engines(started, wire, sleeps=sleeps, fetches=fetches), **named}:
        return elsewhere, _train_engine_apart(config, folder, ranks, sender) if train else None
    model = load(config.model, folder)
    trainer, others = _train_engine(model, folder, config, ranks) if train else (None, {})
    return {"local": served(model, folder, config.model, config.engine, seed=config.seed), **others}, trainer


@contextmanager
def _weight_sender(config: RunConfig, train: bool) -> Iterator["WeightSender | None"]:
    """None: the weights go another way."""
    if not train or config.backend.weights != "transfer":
        yield None
        return
    calm_threads()
    from manege.engine.weight_sender import WeightSender

    with closing(WeightSender()) as sender:
        yield sender


def _train_engine_apart(
    config: RunConfig, folder: ModelFolder, ranks: Ranks | None, sender: "WeightSender | None" = None
) -> TrainEngine:
    """Publishes its weights for engines elsewhere: as folders, unless they fetch them."""
    model = load(config.model, folder)
    publish_folder = None if sender else config.run_folder / "weights"
    return _train_engine(model, folder, config, ranks, publish_folder=publish_folder, sender=sender)[0]


def _train_engine(
    model: "LanguageModel",
    folder: ModelFolder,
    config: RunConfig,
    ranks: Ranks | None,
    publish_folder: Path | None = None,
    sender: "WeightSender | None" = None,
) -> tuple[TrainEngine, Mapping[str, Engine]]:
    """And the inference engines of the other ranks."""
    from manege.trainer.engines.torch import TorchEngine

    reference = config.credit.kl > 0
    if ranks is not None:
        return ranks.join(model, folder, reference=reference, publish_folder=publish_folder, sender=sender)
    engine = TorchEngine(model, folder, config.train, reference=reference, publish_folder=publish_folder, sender=sender)
    return engine, {}


def load(model: ModelConfig, folder: ModelFolder, *, rank: int = 0) -> "LanguageModel":
    """The folder's model, on the device of that rank."""
    calm_threads()
    from manege.model.load import load_model, weights_dtype

    device = _device(model.device, rank)
    dtype = weights_dtype(model.dtype, device)
    _log.info(kv("model", device=device, dtype=str(dtype).removeprefix("torch.")))
    return load_model(folder, device, dtype)


def served(
    loaded: "LanguageModel", folder: ModelFolder, model: ModelConfig, config: EngineConfig, *, seed: int
) -> Engine:
    """An engine in this process that samples from a model."""
    from manege.engine.local import LocalEngine

    return LocalEngine(loaded, folder, config=config, seed=seed, max_context=model.max_context)


def _device(wanted: str, rank: int) -> str:
    """`auto` becomes a GPU if there is one, each rank's own."""
    import torch

    device = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('model.device = "cuda": torch sees no GPU here; use "auto" or "cpu"')
    if device == "cuda" and rank >= torch.cuda.device_count():
        raise ConfigError(
            f"backend.ranks_per_node: rank {rank} has no GPU, torch sees {torch.cuda.device_count()}; have fewer ranks"
        )
    return f"cuda:{rank}" if device == "cuda" and rank else device


@asynccontextmanager
async def train_engine_alone(config: RunConfig, client: Client) -> AsyncIterator[Parts]:
    """A train engine for a gateway elsewhere."""
    if config.backend.engines.count:
        raise ConfigError(
            f"backend.engines.count = {config.backend.engines.count} does nothing with a gateway elsewhere: start the "
            "engines there, or train without --gateway"
        )
    refuse_services(config)
    async with client:
        await client.state()
        folder = open_folder(config.model.path)
        async with (
            other_ranks(config, serves=False) as ranks,
            verl_engine(config, folder, has_engines=True) as verl,
        ):
            engine = verl or await asyncio.to_thread(_train_engine_apart, config, folder, ranks)
            yield Parts(client=client, train_engine=engine, folder=folder)


@dataclass(frozen=True, slots=True)
class _Served:
    url: str
    key: str
    store: str
    """Its name, for people."""


@asynccontextmanager
async def gateway_serving(
    config: GatewayConfig,
    folder: ModelFolder | str,
    engines: Mapping[str, Engine],
    data: Path,
    *,
    max_context: int | None,
    given: Given | None = None,
) -> AsyncIterator[_Served]:
    """The gateway over engines, with its key in `data`, and its store unless the config names another. Bare, it has a
    model's name and no engine: those that take messages register themselves. `given`: it is a worker."""
    async with AsyncExitStack() as stack:
        store = await SqlStore.open(config.store or data / "manege.db")
        stack.push_async_callback(store.close)
        key = config.key or operator_key(data)
        known = None if isinstance(folder, str) else folder
        app = create_app(
            store=store,
            engine=engines,
            renderer=renderer_for(known) if known else None,
            operator_key=key,
            model_name=known.path.name if known else str(folder),
            context_limit=min(filter(None, [known and known.context_limit, max_context]), default=0),
            max_body_bytes=config.max_body_mb * 2**20,
            clock=time.time,
            post=given and given.post,
        )
        server = await stack.enter_async_context(
            GatewayServer(app, host=config.host, port=config.port, has_explicit_key=config.key is not None, given=given)
        )
        yield _Served(server.url, key, store.name)


@asynccontextmanager
async def controlling(client: Client, config: RunConfig, *, terminal: str | None = None) -> AsyncIterator[None]:
    """A controller beside the body of the context; it is stopped at the end, its agents killed. `terminal`: where a
    shell takes their place."""
    controller = Controller(
        client,
        name=f"{socket.gethostname()}-{config.name}",
        folder=config.run_folder,
        config=config.controller,
        sandbox=config.sandbox,
        terminal=terminal,
    )
    try:
        await controller.prepare(config)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(controller.run(), name="controller")
            yield
            task.cancel()
    except* ManegeError as errors:
        error = errors.exceptions[0]
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            _log.warning(kv("while stopping", error=error))
            raise asyncio.CancelledError from error
        raise error from None
