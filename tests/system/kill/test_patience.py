"""What a client does while its gateway, or the gateway's store, is away."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from manege.client import FIRST_PATIENCE_S, Client
from manege.engine.base import Weights
from manege.errors import ConflictError, EngineAwayError, StoreError, UnavailableError
from manege.gateway.server import Server
from manege.http import answer, error_handlers
from tests.conftest import OPERATOR_KEY
from tests.system.kill.site import free_port

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving(*results, port=0):
    """Answers each request by the next result, the last one for ever."""
    left = list(results)

    async def handle(request):
        result = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(result, Exception):
            raise result
        return answer(result)

    routes = [Route("/{path:path}", handle, methods=["GET", "POST"])]
    async with Server(Starlette(routes=routes, exception_handlers=error_handlers), port=port) as server:
        yield server.url


async def test_a_gateway_that_never_answered_is_given_up_soon():
    began_s = time.monotonic()
    async with Client(f"http://127.0.0.1:{free_port()}", OPERATOR_KEY) as client:
        with pytest.raises(UnavailableError, match="is the gateway running"):
            await client.state()
    assert FIRST_PATIENCE_S <= time.monotonic() - began_s < FIRST_PATIENCE_S + 5


async def test_a_gateway_that_answered_before_is_waited_for():
    port = free_port()
    async with Client(f"http://127.0.0.1:{port}", OPERATOR_KEY) as client:
        async with serving({"life": 1}, port=port):
            assert await client.state() == {"life": 1}
        waiting = asyncio.create_task(client.state())
        await asyncio.sleep(FIRST_PATIENCE_S + 3)
        assert not waiting.done()
        async with serving({"life": 2}, port=port):
            assert await waiting == {"life": 2}


async def test_a_store_that_is_away_is_waited_for_and_other_errors_are_not():
    away = StoreError("the database is locked")
    async with serving(away, away, {"life": 1}, ConflictError("over")) as url, Client(url, OPERATOR_KEY) as client:
        assert await client.state() == {"life": 1}
        with pytest.raises(ConflictError):
            await client.state()


async def test_an_engine_that_is_away_is_waited_for_by_what_steers_it():
    away = EngineAwayError("it cannot be reached")
    async with serving(away, {}, away, {"version": 7}, away, {}) as url, Client(url, OPERATOR_KEY) as client:
        await client.pause()
        assert await client.publish(Weights(kind="shared")) == 7
        await client.resume()
