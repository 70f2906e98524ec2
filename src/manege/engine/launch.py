"""Engine servers that a run starts, watches and stops: `backend.engines`.

In: the run's settings and its model folder. Out: the servers' addresses, once all of them answer. One that ends is
started again at its address (`kept.py`), and its client gives it the present weights (`upstream`).
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from manege.backend_config import BackendConfig
from manege.config import ModelConfig
from manege.engine.commands import server_command, server_environment, server_package
from manege.engine.kept import KeptServer, free_ports, keeping

__all__ = ["engine_servers"]


@asynccontextmanager
async def engine_servers(
    backend: BackendConfig, model: ModelConfig, folder: Path, logs: Path
) -> AsyncIterator[Sequence[str]]:
    """The URLs of `backend.engines.count` servers of the model in `folder`, for as long as the context lasts. `logs`: a
    folder for what they write. Raises ConfigError, and EngineError for a server that does not start in time."""
    if not backend.engines.count:
        yield ()
        return
    package = await asyncio.to_thread(server_package, backend.engines)
    logs.mkdir(parents=True, exist_ok=True)
    path = [str(_extension(logs)), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    servers = [
        KeptServer(
            name="engine server",
            command=server_command(backend, model, folder, port=port, package=package),
            environment={**environment, **server_environment(backend, model, index, package=package)},
            url=f"http://127.0.0.1:{port}",
            health="/health",
            log=logs / f"engine-{index}.log",
            start_s=backend.engines.start_s,
            setting="backend.engines.start_s",
        )
        for index, port in enumerate(free_ports(backend.engines.count))
    ]
    async with keeping(servers):
        yield [server.url for server in servers]


def _extension(folder: Path) -> Path:
    """A folder with what vLLM imports of ours, and nothing else of our environment."""
    target = folder / "extension"
    target.mkdir(exist_ok=True)
    for name in ("vllm_worker", "weight_wire"):
        shutil.copyfile(Path(__file__).with_name(f"{name}.py"), target / f"manege_{name}.py")
    return target
