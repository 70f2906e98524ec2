"""The train engine of `backend.kind = "verl"`: Ray and the ranks are there as long as the run, and gone after it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec

from manege.config import RunConfig
from manege.engine.threads import calm_threads
from manege.errors import ConfigError
from manege.model.folder import ModelFolder
from manege.trainer.engines.base import TrainEngine

__all__ = ["verl_engine"]


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
        raise ConfigError(
            'backend.kind = "verl" trains in other processes, and no engine reads its weights: set '
            "backend.engines.count, or gateway.engine_url"
        )
    if find_spec("verl") is None or find_spec("ray") is None:
        raise ConfigError('backend.kind = "verl" needs verl and Ray: pip install "manege[verl]"')
    stack = ExitStack()
    # One thread starts and ends it: Ray's processes die with the thread that started them.
    with ThreadPoolExecutor(1, thread_name_prefix="verl") as thread:
        loop = asyncio.get_running_loop()
        try:
            yield await loop.run_in_executor(thread, lambda: stack.enter_context(_started(config, folder)))
        finally:
            await asyncio.shield(loop.run_in_executor(thread, stack.close))


@contextmanager
def _started(config: RunConfig, folder: ModelFolder) -> Iterator[TrainEngine]:
    calm_threads()
    from manege.trainer.engines.verl.environment import prepare

    cpu = _is_cpu(config)
    environment = prepare(config.backend, cpu=cpu)
    from manege.trainer.engines.verl.cluster import ray_session
    from manege.trainer.engines.verl.engine import started_verl_engine

    with (
        ray_session(config.backend, environment, cpu=cpu),
        started_verl_engine(config, folder, environment, cpu=cpu) as engine,
    ):
        yield engine


def _is_cpu(config: RunConfig) -> bool:
    """`auto`: a cluster has GPUs, even if this machine has none."""
    if config.model.device != "auto" or config.backend.ray_address is not None:
        return config.model.device == "cpu"
    import torch

    return not torch.cuda.is_available()
