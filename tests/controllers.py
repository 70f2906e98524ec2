"""Controllers beside tests."""

import asyncio
import contextlib


@contextlib.asynccontextmanager
async def beside(controller):
    """It runs as long as the body, and is stopped at its end."""
    task = asyncio.create_task(controller.run())
    try:
        yield controller
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
