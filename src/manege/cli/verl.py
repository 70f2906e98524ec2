"""The train engine of `backend.kind = "verl"`: Ray and the ranks are there as long as the run, and gone after it."""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from importlib.util import find_spec

from manege.config import RunConfig
from manege.engine.threads import calm_threads
from manege.errors import ConfigError
from manege.model.folder import ModelFolder
from manege.trainer.engines.base import TrainEngine

__all__ = ["NO_ENGINES", "NO_VERL", "check_verl", "has_verl", "verl_engine"]

NO_ENGINES = (
    'backend.kind = "verl" trains in other processes, and no engine reads its weights: set backend.engines.count, or '
    "gateway.engine_url"
)
NO_VERL = 'backend.kind = "verl" needs verl and Ray: pip install "manege[verl]"'


def has_verl() -> bool:
    """Whether this environment has verl and Ray."""
    return find_spec("verl") is not None and find_spec("ray") is not None


def check_verl(config: RunConfig, folder: ModelFolder, *, cpu: bool) -> None:
    """Have verl read its settings, as it will. Raises ConfigError with verl's errors on `backend.verl`."""
    calm_threads()
    from manege.trainer.engines.verl.environment import prepare

    prepare(config.backend, cpu=cpu)
    from manege.trainer.engines.verl.settings import worker_config

    worker_config(config, folder, cpu=cpu)


@asynccontextmanager
async def verl_engine(
    config: RunConfig, folder: ModelFolder, *, has_engines: bool
) -> AsyncIterator[TrainEngine | None]:
    """None: another kind trains. `has_engines`: there are engines apart, which read the weights from a folder. Raises
    ConfigError, and TrainerError for a cluster that cannot do it."""
    if config.backend.kind != "verl":
        yield None
        return
    if not has_engines:
        raise ConfigError(NO_ENGINES)
    if not has_verl():
        raise ConfigError(NO_VERL)
    calm_threads()
    cpu = _is_cpu(config)
    stack = ExitStack()
    # One thread starts and ends it: Ray's processes die with the thread that started them.
    with ThreadPoolExecutor(1, thread_name_prefix="verl") as thread:
        loop = asyncio.get_running_loop()
        try:
            environment = await loop.run_in_executor(thread, _start_ray, config, stack, cpu)
            _take_signals_back()
            yield await loop.run_in_executor(thread, _start_ranks, config, folder, stack, environment, cpu)
        finally:
            await asyncio.shield(loop.run_in_executor(thread, stack.close))


def _start_ray(config: RunConfig, stack: ExitStack, cpu: bool) -> Mapping[str, str]:
    from manege.trainer.engines.verl.environment import prepare

    environment = prepare(config.backend, cpu=cpu)
    from manege.trainer.engines.verl.cluster import ray_session

    stack.enter_context(ray_session(config.backend, environment, cpu=cpu))
    return environment


def _start_ranks(
    config: RunConfig, folder: ModelFolder, stack: ExitStack, environment: Mapping[str, str], cpu: bool
) -> TrainEngine:
    from manege.trainer.engines.verl.engine import started_verl_engine

    return stack.enter_context(started_verl_engine(config, folder, environment, cpu=cpu))


def _take_signals_back() -> None:
    """Ray's library aborts the process at SIGTERM; a run ends in order, by Python's handler that was there."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _is_cpu(config: RunConfig) -> bool:
    """`auto`: a cluster has GPUs, even if this machine has none."""
    if config.model.device != "auto" or config.backend.ray_address is not None:
        return config.model.device == "cpu"
    import torch

    return not torch.cuda.is_available()
