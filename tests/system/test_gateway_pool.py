"""Registered engines, each behind a socket of its own; the agent is the official SDK."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from manege.client import Client
from manege.engine.base import Weights
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.server import engine_app
from manege.gateway.app import create_app
from manege.gateway.server import GatewayServer, Server
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from manege.types import RolloutSpec, Task
from tests.conftest import OPERATOR_KEY, TINY_MODEL

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving_engine(letter, **options):
    """An engine that answers with one letter, and its endpoint."""
    renderer = renderer_for(open_folder(str(TINY_MODEL)))
    (token,) = renderer.encode(letter)
    engine = ScriptedEngine(hashed_reply(num_tokens=8, first_id=token, last_id=token), **options)
    async with Server(engine_app(engine, encode=renderer.encode, decode=renderer.decode)) as server:
        yield engine, server.url
    await engine.close()


@pytest.fixture
async def http(gateway):
    headers = {"authorization": f"Bearer {OPERATOR_KEY}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, trust_env=False, timeout=60) as opened:
        yield opened


@pytest.fixture
async def ask(client, gateway):
    """One model call of an agent: the letters of its answer."""
    await client.create_rollouts([RolloutSpec(id="r", run="run", task=Task(id="t", input={}))])
    (claim,) = await client.claim(controller="c", limit=1, lease_s=60)
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=claim.agent_key, max_retries=0, http_client=httpx.AsyncClient()
    ) as agent:

        async def call():
            answer = await agent.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
            return "".join(sorted(set(answer.choices[0].message.content)))

        yield call


def register(http, *endpoints, **fields):
    return http.post("/api/models", json=[{"model": "m", "endpoint": endpoint, "mode": "tokens", **fields} for endpoint in endpoints])


async def versions(client):
    return [[span.version for span in call.spans] for call in (await client.calls(["r"]))["r"]]


async def test_calls_go_to_a_registered_engine_and_back_to_the_gateways_own_when_it_is_forgotten(http, ask, client):
    own = await ask()
    async with serving_engine("x") as (_, url):
        made = await register(http, f"{url}/v1", version=4)
        assert made.status_code == 201
        assert (await http.get("/api/models")).json() == [
            {"model": "m", "endpoint": f"{url}/v1", "version": 4, "mode": "tokens"}
        ]
        assert await ask() == "x"
        assert (await http.delete("/api/models")).json() == {"status": "ok"}
        assert await ask() == own != "x"


async def test_the_least_busy_engine_gets_the_call(http, ask):
    async with AsyncExitStack() as stack:
        slow, slow_url = await stack.enter_async_context(serving_engine("x", token_delay_s=0.05))
        _, fast_url = await stack.enter_async_context(serving_engine("y"))
        await register(http, slow_url, f"{fast_url}/v1/")
        await slow.pause()
        first = asyncio.create_task(ask())
        while not slow.num_running:
            await asyncio.sleep(0.01)
        assert [await ask() for _ in range(3)] == ["y"] * 3
        await slow.resume()
        assert await first == "x"


async def test_pause_weights_and_resume_reach_every_engine(http, ask, client, engine):
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serving_engine(letter)) for letter in "xy"]
        await register(http, *[url for _, url in served])
        engines = [engine, *[each for each, _ in served]]
        await client.pause(drain_s=1)
        assert [(await each.info()).paused for each in engines] == [True] * 3
        await client.publish(Weights(kind="folder", folder="/weights"))
        await client.resume()
        assert [((await each.info()).paused, (await each.info()).version) for each in engines] == [(False, 1)] * 3
        await ask()
    assert await versions(client) == [[1]]


async def test_a_forgotten_engine_finishes_its_calls(http, ask):
    async with serving_engine("x") as (engine, url):
        await register(http, url)
        await engine.pause()
        asking = asyncio.create_task(ask())
        while not engine.num_running:
            await asyncio.sleep(0.01)
        await http.delete("/api/models")
        assert await ask() != "x"
        await engine.resume()
        assert await asking == "x"


async def test_registrations_survive_a_restart_of_the_gateway(store, engine):
    def made():
        renderer = renderer_for(open_folder(str(TINY_MODEL)))
        return create_app(
            store=store, engine=engine, renderer=renderer, operator_key="k", model_name="m", context_limit=2048
        )

    async with serving_engine("x") as (_, url):
        async with GatewayServer(made()) as server, httpx.AsyncClient(trust_env=False) as http:
            headers = {"authorization": "Bearer k"}
            body = [{"model": "m", "endpoint": url, "mode": "tokens"}]
            assert (await http.post(f"{server.url}/api/models", json=body, headers=headers)).status_code == 201
        async with GatewayServer(made()) as server, Client(server.url, "k") as client:
            await client.create_rollouts([RolloutSpec(id="r", run="run", task=Task(id="t", input={}))])
            (claim,) = await client.claim(controller="c", limit=1, lease_s=60)
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=claim.agent_key) as agent:
                answer = await agent.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
            assert set(answer.choices[0].message.content) == {"x"}


def messages_only():
    """An OpenAI-like server that knows no token ids."""

    async def models(_request):
        return JSONResponse({"data": [{"id": "m", "max_model_len": 64}]})

    async def completions(_request):
        return JSONResponse({"choices": [{"text": "Hi", "finish_reason": "stop"}]})

    return [Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])]


def not_an_engine():
    async def models(_request):
        return JSONResponse({"hello": "world"})

    return [Route("/v1/models", models)]


@pytest.mark.parametrize(
    ("routes", "reason"),
    [
        (messages_only, "None token ids and None log-probabilities"),
        (not_an_engine, "in a shape that is not vLLM's"),
        (list, "/v1/models answered 404"),
    ],
)
async def test_an_endpoint_that_takes_no_token_ids_is_refused(http, ask, routes, reason):
    async with serving_engine("x") as (_, good), Server(Starlette(routes=routes())) as server:
        refused = await register(http, good, server.url)
        message = refused.json()["error"]["message"]
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "unprocessable")
        assert message.startswith(f"endpoint {server.url} of model 'm' is not registered")
        assert reason in message
        assert "start vLLM with" in message
        assert (await http.get("/api/models")).json() == []
        assert await ask() != "x"


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9/v1", "ftp://there", "nonsense", ""])
async def test_an_endpoint_that_cannot_be_reached_is_refused(http, endpoint):
    refused = await register(http, endpoint)
    assert refused.status_code == 422
    assert "cannot be reached" in refused.json()["error"]["message"]
