"""A server that a run started: it is ready before the run goes on, is watched, and goes when the run goes.

It writes its log into a file and lives under a keeper (`keeper.py`), so that it dies with this process, however that
dies. One that ends while it starts is an error with the end of its log; one that ends later is started again, at its
address.
"""

import asyncio
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from manege.engine import keeper
from manege.engine.http1 import HttpClient
from manege.errors import EngineError, ManegeError
from manege.logs import get_logger, kv

__all__ = ["KeptServer", "free_ports", "keeping"]

LOOK_S = 0.25
"""Between two looks at a server that starts."""
NUM_LINES = 15
"""Of a log, in an error."""

_log = get_logger("engine")


@dataclass(kw_only=True)
class KeptServer:
    """One server, and how it is started."""

    name: str
    """For people."""
    command: Sequence[str]
    environment: Mapping[str, str]
    url: str
    health: str
    """The path that it answers when it is ready."""
    log: Path
    start_s: float
    setting: str
    """The name of `start_s` in a run file."""
    error: type[ManegeError] = EngineError
    """When it does not start."""
    _process: asyncio.subprocess.Process | None = field(init=False, default=None)

    async def start(self) -> None:
        """Return when it answers."""
        began_s = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"{time.strftime('%F %T')} {' '.join(self.command)}\n".encode())
            log.flush()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", keeper.__file__, *self.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(self.start_s):
                await self._until_ready(self._process)
        except TimeoutError:
            raise self.error(
                f"the {self.name} did not answer within {self.setting} = {self.start_s:g} s: {self._told()}"
            ) from None
        _log.info(kv(f"{self.name} ready", url=self.url, after_s=round(time.monotonic() - began_s, 1)))

    async def keep(self) -> None:
        """Start it again whenever it ends. Raises an error when it ends while it starts."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            _log.warning(kv(f"the {self.name} has ended and is started again", code=code, url=self.url, log=self.log))
            await self.start()

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
                    status, _ = await client.request("GET", self.health)
                    if status < 300:
                        return
                await asyncio.sleep(LOOK_S)
        finally:
            await client.close()
        raise self.error(f"the {self.name} ended while it started, with code {process.returncode}: {self._told()}")

    def _told(self) -> str:
        with self.log.open(errors="replace") as log:
            lines = deque(log, NUM_LINES)
        return f"see {self.log}, which ends\n{''.join(lines).rstrip()}"


@asynccontextmanager
async def keeping(servers: Sequence[KeptServer]) -> AsyncIterator[None]:
    """All of them answer when the context begins, are kept while it lasts, and are gone at its end."""
    try:
        async with asyncio.TaskGroup() as group:
            await asyncio.gather(*[group.create_task(server.start()) for server in servers])
            tasks = [group.create_task(server.keep(), name=f"keep {server.url}") for server in servers]
            yield
            for task in tasks:
                task.cancel()
    except* ManegeError as errors:
        raise errors.exceptions[0] from None
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


def free_ports(count: int) -> Sequence[int]:
    """Free now; all are held until all are known."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
