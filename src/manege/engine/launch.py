"""Engine servers that a run starts, watches and stops: `backend.engines`.

In: the run's settings and its model folder. Out: the servers' addresses, once all of them answer. Each writes its log
into the run folder and lives under a keeper (`keeper.py`), so that it dies with this process, however that dies. One
that ends while it starts is an error with the end of its log; one that ends later is started again at its address, and
its client gives it the present weights (`upstream`).
"""

import asyncio
import os
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

from manege.backend_config import BackendConfig
from manege.config import ModelConfig
from manege.engine import keeper
from manege.engine.commands import server_command, server_environment, server_package
from manege.engine.http1 import HttpClient
from manege.errors import EngineError, ManegeError
from manege.logs import get_logger, kv

__all__ = ["engine_servers"]

LOOK_S = 0.25
"""Between two looks at a server that starts."""
NUM_LINES = 15
"""Of a log, in an error."""

_log = get_logger("engine")


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
        _Server(
            server_command(backend, model, folder, port=port, package=package),
            {**environment, **server_environment(backend, model, index, package=package)},
            url=f"http://127.0.0.1:{port}",
            log=logs / f"engine-{index}.log",
        )
        for index, port in enumerate(_free_ports(backend.engines.count))
    ]
    try:
        async with asyncio.TaskGroup() as group:
            starts = [group.create_task(server.start(backend.engines.start_s)) for server in servers]
            await asyncio.gather(*starts)
            keeping = [
                group.create_task(server.keep(backend.engines.start_s), name=f"keep {server.url}") for server in servers
            ]
            yield [server.url for server in servers]
            for task in keeping:
                task.cancel()
    except* ManegeError as errors:
        raise errors.exceptions[0] from None
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


class _Server:
    def __init__(self, command: Sequence[str], environment: dict[str, str], *, url: str, log: Path) -> None:
        self.url = url
        self._command, self._environment, self._log = command, environment, log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, start_s: float) -> None:
        """Return when it answers."""
        began_s = time.monotonic()
        with self._log.open("ab") as log:
            log.write(f"{time.strftime('%F %T')} {' '.join(self._command)}\n".encode())
            log.flush()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", keeper.__file__, *self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(start_s):
                await self._until_ready(self._process)
        except TimeoutError:
            raise EngineError(
                f"the engine server did not answer within backend.engines.start_s = {start_s:g} s: {self._told()}"
            ) from None
        _log.info(kv("engine server ready", url=self.url, after_s=round(time.monotonic() - began_s, 1)))

    async def keep(self, start_s: float) -> None:
        """Start it again whenever it ends. Raises EngineError when it ends while it starts."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            _log.warning(kv("an engine server has ended and is started again", code=code, url=self.url, log=self._log))
            await self.start(start_s)

    async def stop(self) -> None:
        """Return when all of its processes are gone. Safe to repeat."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        await asyncio.shield(self._process.wait())

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        client = HttpClient(self.url)
        try:
            while process.returncode is None:
                with suppress(EngineError):
                    status, _ = await client.request("GET", "/health")
                    if status < 300:
                        return
                await asyncio.sleep(LOOK_S)
        finally:
            await client.close()
        raise EngineError(f"the engine server ended while it started, with code {process.returncode}: {self._told()}")

    def _told(self) -> str:
        with self._log.open(errors="replace") as log:
            lines = deque(log, NUM_LINES)
        return f"see {self._log}, which ends\n{''.join(lines).rstrip()}"


def _extension(folder: Path) -> Path:
    """A folder with what vLLM imports of ours, and nothing else of our environment."""
    target = folder / "extension"
    target.mkdir(exist_ok=True)
    for name in ("vllm_worker", "weight_wire"):
        shutil.copyfile(Path(__file__).with_name(f"{name}.py"), target / f"manege_{name}.py")
    return target


def _free_ports(count: int) -> Sequence[int]:
    """Free now; all are held until all are known."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
