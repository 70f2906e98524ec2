"""Ask a gateway until it answers: it and its store may be restarting."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from manege.errors import StoreError, UnavailableError
from manege.logs import get_logger

__all__ = ["RETRY_S", "reach"]

RETRY_S = 1.0
"""Beyond what the client tries."""

_log = get_logger("controller")

T = TypeVar("T")


async def reach(request: Callable[[], Awaitable[T]]) -> T:
    """Repeat a request of the client that did not reach the gateway. Raises what it was answered."""
    while True:
        try:
            return await request()
        except (UnavailableError, StoreError) as error:
            _log.warning(str(error))
            await asyncio.sleep(RETRY_S)
