"""Whether an HTTP caller is still there while its answer is being generated; for the gateway and the engine server.

ASGI tells of a disconnect only to who calls `receive`, so one task waits there until the answer is sent.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

__all__ = ["ClientGone", "Connection"]

T = TypeVar("T")


class ClientGone(Exception):
    """The caller closed its connection before it was answered."""


class Connection:
    """Used as `async with Connection(receive)` after the request body was read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def __aenter__(self) -> Self:
        self._watch = asyncio.create_task(self._until_gone(), name="connection-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _cancel(self._watch)

    @property
    def gone(self) -> bool:
        """Means something until the answer is sent; a complete answer also ends the watch."""
        return self._watch.done()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`, but cancel it and raise ClientGone as soon as the caller goes away."""
        task = asyncio.create_task(work, name="connection-work")
        try:
            await asyncio.wait({task, self._watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            await _cancel(task)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
