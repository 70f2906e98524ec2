"""Registered engines, each behind a socket of its own; the agent is the official SDK."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from manege.cli.parts import upstream_engines
from manege.client import Client
from manege.engine.base import Sampling, Weights, collect
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.server import engine_app
from manege.errors import EngineError, UnavailableError, UnprocessableError
from manege.gateway.app import create_app
from manege.gateway.forward import MessagesSource
from manege.gateway.members import MAX_EXTRA_CALLS
from manege.gateway.pool import EnginePool, Registration
from manege.gateway.server import GatewayServer, Server
from manege.model.folder import open_folder
from manege.protocols.base import AskedSampling, ModelRequest
from manege.rendering.select import renderer_for
from manege.types import RolloutSpec, Task
from tests.chat_engine import chat_engine, raw_server
from tests.chat_engine import http as http_answer
from tests.conftest import OPERATOR_KEY, TINY_MODEL
from tests.sglang_wire import SglangServer

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving_engine(letter, *, port=0, wrap=lambda app: app, **options):
    """An engine that answers with one letter, and its endpoint. `wrap` makes another application of its own."""
    renderer = renderer_for(open_folder(str(TINY_MODEL)))
    (token,) = renderer.encode(letter)
    engine = ScriptedEngine(hashed_reply(num_tokens=8, first_id=token, last_id=token), **options)
    app = engine_app(engine, encode=renderer.encode, decode=renderer.decode)
    async with Server(wrap(app), port=port) as server:
        yield engine, server.url
    await engine.close()


@asynccontextmanager
async def serving_sglang(letter, **options):
    """The same on SGLang's wire."""
    folder = open_folder(str(TINY_MODEL))
    (token,) = renderer_for(folder).encode(letter)
    engine = ScriptedEngine(hashed_reply(num_tokens=8, first_id=token, last_id=token), **options)
    made = SglangServer(engine, decode=folder.tokenizer.decode, context_limit=2048, incremental=True)
    async with Server(made.app) as server:
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
    return http.post(
        "/api/models", json=[{"model": "m", "endpoint": endpoint, "mode": "tokens", **fields} for endpoint in endpoints]
    )


async def versions(client):
    return [[span.version for span in call.spans] for call in (await client.calls(["r"]))["r"]]


async def test_calls_go_to_a_registered_engine_and_back_to_the_gateways_own_when_it_is_forgotten(http, ask, client):
    own = await ask()
    async with serving_engine("x") as (_, url):
        made = await register(http, f"{url}/v1", version=4)
        assert made.status_code == 201
        assert (await http.get("/api/models")).json() == [
            {"model": "m", "endpoint": f"{url}/v1", "version": 4, "mode": "tokens", "wire": "vllm"}
        ]
        assert await ask() == "x"
        assert (await http.delete("/api/models")).json() == {"status": "ok"}
        assert await ask() == own != "x"


@asynccontextmanager
async def pool_of(store, *letters, mode="tokens"):
    """A pool, and per letter an engine of its own that answers with it."""
    async with AsyncExitStack() as stack:
        serve = serving_engine if mode == "tokens" else lambda letter: chat_engine(letters=letter * 2)
        served = [await stack.enter_async_context(serve(letter)) for letter in letters]
        pool = EnginePool({}, store)
        stack.push_async_callback(pool.close)
        await pool.register([Registration(model="m", endpoint=url, mode=mode) for _, url in served])
        yield pool, dict(zip(letters, (engine for engine, _ in served), strict=True))


async def letter(pool, session):
    """Which engine answers a call of a session."""
    if pool.mode == "messages":
        request = ModelRequest(messages=[{"role": "user", "content": "hi"}], sampling=AskedSampling(), raw={})
        source = MessagesSource(request, sampling=Sampling(max_new_tokens=1), emit=lambda _: None)
        ids = (await pool.forward(source, session)).generation.ids_R.tolist()
    else:
        ids = (await collect(pool.generate([1, 2], Sampling(max_new_tokens=1), session))).ids_R.tolist()
    return renderer_for(open_folder(str(TINY_MODEL))).decode(ids)


@pytest.mark.parametrize("mode", ["tokens", "messages"])
async def test_a_conversation_stays_on_its_engine_and_conversations_spread(store, mode):
    async with pool_of(store, "x", "y", mode=mode) as (pool, _):
        homes = {session: await letter(pool, session) for session in map(str, range(16))}
        assert set(homes.values()) == {"x", "y"}
        assert {session: await letter(pool, session) for session in homes} == homes


async def test_an_overloaded_engine_loses_calls_to_the_idlest_one(store):
    async with pool_of(store, "x", "y") as (pool, engines):
        home = await letter(pool, "s")
        (other,) = set("xy") - {home}
        await engines[home].pause()
        asking = [asyncio.create_task(letter(pool, "s")) for _ in range(MAX_EXTRA_CALLS + 1)]
        while engines[home].num_running < MAX_EXTRA_CALLS + 1:
            await asyncio.sleep(0.01)
        assert await letter(pool, "s") == other
        await engines[home].resume()
        assert [await task for task in asking] == [home] * (MAX_EXTRA_CALLS + 1)
        assert await letter(pool, "s") == home


@pytest.mark.parametrize("mode", ["tokens", "messages"])
async def test_a_call_of_a_lost_engine_is_tried_on_another_and_the_lost_one_is_used_again_when_it_is_back(store, mode):
    serve = serving_engine if mode == "tokens" else lambda letter, **at: chat_engine(letters=letter * 2, **at)
    async with AsyncExitStack() as stack:
        _, good = await stack.enter_async_context(serve("y"))
        pool = EnginePool({}, store)
        stack.push_async_callback(pool.close)
        async with serve("x") as (_, url):
            port = int(url.rpartition(":")[2])
            await pool.register([Registration(model="m", endpoint=each, mode=mode) for each in (url, good)])
            homes = {session: await letter(pool, session) for session in map(str, range(16))}
            session = next(session for session, home in homes.items() if home == "x")
        assert [await letter(pool, session) for _ in range(3)] == ["y"] * 3
        assert (pool.num_retried, pool.num_unhealthy) == (1, 1)
        async with serve("x", port=port), asyncio.timeout(10):
            while pool.num_unhealthy:
                await asyncio.sleep(0.05)
            assert await letter(pool, session) == "x"


async def test_one_of_several_given_engines_that_is_lost_is_not_used_until_it_is_back(store):
    async with AsyncExitStack() as stack:
        _, good = await stack.enter_async_context(serving_engine("y"))
        async with serving_engine("x") as (_, url):
            port = int(url.rpartition(":")[2])
            engines = upstream_engines([url, f"{good}/v1"])
            for engine in engines.values():
                stack.push_async_callback(engine.close)
            pool = EnginePool(engines, store)
            stack.push_async_callback(pool.close)
            homes = {session: await letter(pool, session) for session in map(str, range(16))}
            session = next(session for session, home in homes.items() if home == "x")
        assert set(homes.values()) == {"x", "y"}
        assert [await letter(pool, session) for _ in range(3)] == ["y"] * 3
        assert (pool.num_retried, pool.num_unhealthy) == (1, 1)
        async with serving_engine("x", port=port), asyncio.timeout(10):
            while pool.num_unhealthy:
                await asyncio.sleep(0.05)
            assert await letter(pool, session) == "x"


async def test_a_call_is_not_tried_again_once_it_has_begun_nor_without_another_engine(store):
    first = b'data: {"choices":[{"delta":{"content":"h"}}]}\n\n'
    whole = http_answer(first)
    async with raw_server(whole) as broken, raw_server(whole) as also_broken:
        pool = EnginePool({}, store)
        await pool.register([Registration(model="m", endpoint=url) for url in (broken, also_broken)])
        deltas = []
        asked = ModelRequest(
            messages=[{"role": "user", "content": "hi"}], stream=True, sampling=AskedSampling(), raw={}
        )
        source = MessagesSource(asked, sampling=Sampling(max_new_tokens=1), emit=deltas.append)
        with pytest.raises(EngineError, match="without a finish reason"):
            await pool.forward(source, "s")
        assert ([delta.content for delta in deltas], pool.num_retried) == (["h"], 0)
        await pool.close()
    pool = EnginePool({}, store)
    with pytest.raises(UnavailableError, match="POST /api/models"):
        await letter(pool, "s")


async def test_modes_are_not_mixed(store):
    async with pool_of(store, "x") as (pool, _), chat_engine() as (_, url):
        with pytest.raises(UnprocessableError, match="both modes cannot serve together"):
            await pool.register([Registration(model="m", endpoint=url)])
        await pool.clear()
        await pool.register([Registration(model="m", endpoint=url)])
        assert pool.mode == "messages"


async def test_an_engine_without_a_mode_takes_messages_and_need_not_take_token_ids(http):
    async with chat_engine() as (engine, url):
        made = await http.post("/api/models", json=[{"model": "m", "endpoint": f"{url}/v1"}])
        assert (made.status_code, made.json()[0]["mode"], engine.bodies) == (201, "messages", [])


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


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_an_engine_that_is_forgotten_while_it_streams_loses_nothing(http, client, gateway, wire):
    await client.create_rollouts([RolloutSpec(id=str(i), run="run", task=Task(id="t", input={})) for i in range(30)])
    claims = iter(await client.claim(controller="c", limit=30, lease_s=60))
    async with AsyncExitStack() as stack:
        serve = serving_engine if wire == "vllm" else serving_sglang
        served = [await stack.enter_async_context(serve(letter, token_delay_s=0.1)) for letter in "xy"]
        await register(http, *[url for _, url in served], wire=wire)
        (engine, url), (_, other_url) = served
        text = []
        while "x" not in text:
            text, claim = [], next(claims)
            streaming = asyncio.create_task(stream(gateway, claim, text))
            async with asyncio.timeout(20):
                while not text and not streaming.done():
                    await asyncio.sleep(0.01)
            assert text
        await engine.pause()
        assert 0 < len(text) < 8
        gone = await http.delete("/api/models", params={"endpoint": f"{url}/v1"})
        assert gone.json() == {"status": "ok", "running": 1}
        assert [entry["endpoint"] for entry in (await http.get("/api/models")).json()] == [other_url]
        await stream(gateway, claim, others := [])
        assert "".join(others) == "y" * 8
        await engine.resume()
        await streaming
        assert "".join(text) == "x" * 8
        async with asyncio.timeout(20):
            while (again := await http.delete("/api/models", params={"endpoint": url})).status_code != 404:
                await asyncio.sleep(0.01)
        assert "no engine is registered at" in again.json()["error"]["message"]
    (calls,) = (await client.calls([claim.rollout.spec.id])).values()
    assert sorted(len(call.response_ids_R) for call in calls) == [8, 8]


async def stream(gateway, claim, parts):
    """One model call of an agent; what comes is put into `parts` as it comes."""
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=claim.agent_key, max_retries=0, http_client=httpx.AsyncClient(timeout=30)
    ) as agent:
        messages = [{"role": "user", "content": claim.rollout.spec.id}]
        answer = await agent.chat.completions.create(model="any", messages=messages, stream=True)
        async for chunk in answer:
            parts += [choice.delta.content for choice in chunk.choices if choice.delta.content]


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
        (messages_only, "not a stream of events"),
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
