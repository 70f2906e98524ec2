"""What the relay makes of requests, and of a gateway that is away."""

import asyncio
import signal
from contextlib import asynccontextmanager
from urllib.parse import unquote

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from manege.client import Client
from manege.gateway.server import Server
from tests.conftest import OPERATOR_KEY
from tests.system.agents.asking import until
from tests.system.handed.agents import chat, claimed, sandbox

pytestmark = pytest.mark.anyio


async def test_a_call_whose_gateway_dies_is_answered_503_by_the_relay(process, engine):
    gateway, gateway_url = process
    async with Client(gateway_url, OPERATOR_KEY) as client:
        (claim,) = await claimed(client, "r1")
        async with sandbox(client, claim, "relayed") as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
            await client.pause(drain_s=0)
            call = asyncio.create_task(chat(http))

            async def is_held():
                return (await client.state())["held"] == 1

            await until(is_held)
            await asyncio.to_thread(gateway.kill, signal.SIGKILL)
            answer = await call
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.json()["error"]["code"] == "unavailable"


@asynccontextmanager
async def relayed_to(app, claim):
    """The relay's address in front of an application that stands for a gateway."""
    async with (
        Server(app) as server,
        Client(server.url, OPERATOR_KEY) as far,
        sandbox(far, claim, "relayed") as url,
    ):
        yield url


async def test_the_relay_passes_bodies_paths_and_headers_as_they_come(claims):
    async def echo(request):
        body = await request.body()
        told = {"path": request.url.path, "query": request.url.query, "size": len(body), "sum": sum(body[:100])}
        return JSONResponse(told | {"headers": dict(request.headers)}, 418, headers={"x-own": "1"})

    async with (
        relayed_to(Starlette(routes=[Route("/{rest:path}", echo, methods=["GET", "POST"])]), claims[0]) as url,
        httpx.AsyncClient(trust_env=False, timeout=30) as http,
    ):

        async def parts():
            for _ in range(32):
                yield b"\x01" * (1 << 20)

        body = b"\x01" * (32 << 20)
        for content in (body, parts()):
            answer = await http.post(f"{url}/v1/x", content=content, headers={"x-api-key": "mine", "x-seen": "yes"})
            told = answer.json()
            assert (answer.status_code, answer.headers["x-own"]) == (418, "1")
            assert (told["size"], told["sum"]) == (len(body), 100)
            assert told["headers"]["authorization"] == f"Bearer {claims[0].agent_key}"
            assert told["headers"]["x-seen"] == "yes"
            assert "x-api-key" not in told["headers"]
        for path, query in (("//127.0.0.1:1/x", "a=%2F&b"), ("/@127.0.0.1:1", ""), ("/a%20b", "")):
            told = (await http.get(f"{url}{path}" + (f"?{query}" if query else ""))).json()
            assert (told["path"], told["query"], told["size"]) == (unquote(path), query, 0)
