"""Sockets on which agents find the gateway: known by the socket, whatever is sent on it; handed over or relayed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from urllib.parse import unquote

import anthropic
import httpx
import httpx2
import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from manege.client import Client
from manege.controller.relay import relay
from manege.controller.sockets import answering
from manege.engine.scripted import ScriptedEngine
from manege.engine.server import engine_app
from manege.errors import UnauthorizedError
from manege.gateway.server import Server
from manege.listening import listening
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from manege.store.base import Ending
from manege.types import Delivered, Outcome, RolloutSpec, Task
from tests.conftest import OPERATOR_KEY, TINY_MODEL
from tests.system.agents.asking import ask, until, user
from tests.system.kill.processes import Part
from tests.system.kill.site import free_port

pytestmark = pytest.mark.anyio

WORDS = "word " * 40
"""200 tokens, which take a second."""
WAYS = ["handed over", "relayed"]


@asynccontextmanager
async def relaying(client, claim):
    """As `answering` does for a gateway elsewhere."""
    with ExitStack() as given:
        tasks = []

        def take(listener):
            tasks.append(asyncio.create_task(relay(given.enter_context(listener), client, claim.agent_key)))

        yield take
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def sandbox(client, claim, way="handed over"):
    """Where the agent of a claim finds the gateway."""
    way = {"handed over": answering, "relayed": relaying}[way]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with way(client, claim) as take:
            take(listener.dup())
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def claimed(client, *names, **fields):
    specs = [RolloutSpec(id=name, run="r", task=Task(id="t", input={}), **fields) for name in names]
    await client.create_rollouts(specs)
    claims = await client.claim(controller="c", limit=len(names), lease_s=600)
    by_name = {claim.rollout.spec.id: claim for claim in claims}
    return [by_name[name] for name in names]


@pytest.fixture
async def claims(client):
    return await claimed(client, "r1", "r2")


@pytest.fixture(params=WAYS)
async def url(request, client, claims):
    """Of the agent of r1."""
    async with sandbox(client, claims[0], request.param) as found:
        yield found


@pytest.fixture
async def http(url):
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as opened:
        yield opened


@asynccontextmanager
async def openai_at(url, key="none", **options):
    http_client = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http_client, **options) as made:
        yield made


def chat(http, path="/v1/chat/completions", **options):
    return http.post(path, json={"model": "m", "messages": [user("hi")]}, **options)


async def count(store, name):
    return len((await store.calls([name]))[name])


async def test_calls_are_of_the_sockets_rollout_whatever_key_is_sent(url, http, claims, store):
    keys = ["none", OPERATOR_KEY, claims[1].agent_key]
    for key in keys:
        async with openai_at(url, key) as client:
            assert (await ask(client, [user("hi")])).choices[0].message.content
        sent = httpx2.AsyncClient(trust_env=False)
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, http_client=sent) as client:
            assert (await client.messages.create(model="m", max_tokens=9, messages=[user("hi")])).content
        for options in (
            {"headers": {"x-goog-api-key": key}},
            {"params": {"key": key}},
            {"headers": [("authorization", f"Bearer {key}"), ("Authorization", f"Bearer {key}")]},
        ):
            assert (await chat(http, **options)).status_code == 200
    assert (await chat(http)).status_code == 200
    assert (await count(store, "r1"), await count(store, "r2")) == (5 * len(keys) + 1, 0)
    assert not any("key" in name or name == "authorization" for call in (await store.calls(["r1"]))["r1"]
                   for name in call.headers)  # fmt: skip


@pytest.mark.parametrize("key", ["none", OPERATOR_KEY])
async def test_nothing_is_open_on_it_but_the_attempts_own(url, http, claims, key, store):
    http.headers["authorization"] = f"Bearer {key}"
    for method, path in (
        ("GET", "/proxy/state"),
        ("POST", "/proxy/pause"),
        ("GET", "/metrics"),
        ("POST", "/api/leases"),
        ("GET", "/api/rollouts/r1"),
        ("GET", "/api/rollouts/r1/events"),
        ("POST", "/api/rollouts/r1/cancel"),
        ("POST", "/api/rollouts/r2/attempt/0/events"),
        ("POST", "/api/rollouts/r1/attempt/1/events"),
    ):
        answer = await http.request(method, path, params={"key": key}, json={} if method == "POST" else None)
        assert answer.status_code == 403, (path, answer.text)
    other = "/proxy/rollout/r2/attempt/0/mode/train/openai/v1/chat/completions"
    assert (await chat(http, other)).status_code == 403
    assert (await chat(http, other.replace("r2", "r1"))).status_code == 200
    event = {"event_type": "note", "data": {"by": "agent"}}
    assert (await http.post("/api/rollouts/r1/attempt/0/events", json=event)).status_code == 200
    reward = {"event_type": "reward", "data": {"value": 1.0}}
    assert (await http.post("/api/rollouts/r1/attempt/0/events", json=reward)).status_code == 403
    assert [event.data for event in await store.events("r1", event_type="note")] == [{"by": "agent"}]
    assert (await count(store, "r1"), await count(store, "r2")) == (1, 0)


async def test_an_attempt_that_was_cancelled_is_answered_409_at_once(url, http, client, store):
    assert (await chat(http)).status_code == 200
    await client.cancel("r1")
    assert (await chat(http)).status_code == 409
    async with openai_at(url) as agent:
        with pytest.raises(openai.ConflictError):
            await ask(agent, [user("hi")])
    assert len(await store.events("r1", event_type="late.call")) == 2


async def test_an_attempt_that_was_superseded_is_answered_409_also_when_handed_over_late(http, client, claims, store):
    await client.finish("r1", 0, Ending(outcome=Outcome.INFRA_ERROR))
    (again,) = await client.claim(controller="c", limit=1, lease_s=60)
    assert (await chat(http)).status_code == 409
    for way in WAYS:
        async with sandbox(client, claims[0], way) as late, sandbox(client, again, way) as current:
            async with openai_at(late) as agent:
                with pytest.raises(openai.ConflictError):
                    await ask(agent, [user("hi")])
            async with openai_at(current) as agent:
                await ask(agent, [user("hi")])


slow = pytest.mark.parametrize("engine", [0.005], indirect=True, ids=["slow"])


@pytest.fixture
async def engine(request):
    """A test may say how long it takes for a token."""
    ids = renderer_for(open_folder(str(TINY_MODEL))).encode(WORDS)
    delay_s = getattr(request, "param", 0)
    made = ScriptedEngine(lambda _: ids if delay_s else ids[:5], token_delay_s=delay_s)
    yield made
    await made.close()


@slow
async def test_a_stream_begins_while_the_engine_still_samples(url, engine, store):
    async with openai_at(url) as agent:
        stream = await ask(agent, [user("hi")], stream=True)
        first = await anext(chunk async for chunk in stream if chunk.choices[0].delta.content)
        assert engine.num_running == 1
        rest = [chunk.choices[0] async for chunk in stream]
    text = first.choices[0].delta.content + "".join(choice.delta.content or "" for choice in rest)
    assert (text, rest[-1].finish_reason) == (WORDS, "stop")
    assert await count(store, "r1") == 1


@slow
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_an_agent_that_goes_away_ends_its_call_at_the_engine(url, engine, store, is_stream):
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        body = {"model": "m", "messages": [user("hi")], "stream": is_stream}
        call = asyncio.create_task(http.post("/v1/chat/completions", json=body))

        async def runs():
            return engine.num_running == 1

        async def is_noted():
            (noted,) = (await store.calls(["r1"]))["r1"] or [None]
            return noted and noted.delivered is Delivered.NO

        await until(runs)
        call.cancel()
    await until(is_noted)
    assert engine.num_running == 0


async def test_the_end_of_the_attempt_closes_its_connections_and_no_others(client, claims, gateway):
    async with sandbox(client, claims[1]) as other, httpx.AsyncClient(base_url=other, trust_env=False) as stays:
        for way in WAYS:
            async with sandbox(client, claims[0], way) as url:
                port = int(url.rpartition(":")[2])
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert b'"ok"' in await asyncio.wait_for(reader.read(), 5)
            writer.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            assert (await chat(stays)).status_code == 200


async def test_a_socket_is_taken_only_with_an_attempts_key(client, claims):
    for wrong in (OPERATOR_KEY, "mk-0-00000000000000000000000000000000-r1", claims[0].agent_key[:-1]):
        with pytest.raises(UnauthorizedError, match="key"):
            async with sandbox(client, replace(claims[0], agent_key=wrong)):
                await asyncio.get_running_loop().create_future()


async def test_the_door_refuses_what_is_not_a_listening_socket_and_stays_open(client, claims, tmp_path):
    door, key = await client.door(), claims[0].agent_key.encode()
    with (tmp_path / "file").open("w") as file, socket.socket() as idle:
        for descriptors, said in (
            ([], "no socket"),
            ([file.fileno()], "not a socket"),
            ([idle.fileno()], "not listen"),
        ):
            with closing(knock(door)) as connection:
                socket.send_fds(connection, [key], descriptors)
                answer = await asyncio.get_running_loop().sock_recv(connection, 4096)
                assert said in answer.decode()
        knock(door).close()
    async with sandbox(client, claims[0]) as url, openai_at(url) as agent:
        await ask(agent, [user("hi")])


def knock(door):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{door}")
    connection.setblocking(False)
    return connection


async def test_200_sockets_at_once_are_told_apart(client, store):
    names = [f"r{number}" for number in range(200)]

    async def run(claim):
        async with sandbox(client, claim) as url:
            for _ in range(2):
                assert (await chat(http, f"{url}/v1/chat/completions")).status_code == 200
                await all_asked.wait()

    all_asked = asyncio.Barrier(len(names))
    async with httpx.AsyncClient(trust_env=False, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*map(run, await claimed(client, *names)))
    assert {name: len(calls) for name, calls in (await store.calls(names)).items()} == dict.fromkeys(names, 2)


@pytest.fixture
async def engine_url(engine):
    async with Server(engine_app(engine, encode=list, decode=str)) as server:
        yield server.url


@pytest.fixture
def process(tmp_path, engine_url):
    """A gateway that can be killed, and its address."""
    port, folder = free_port(), tmp_path / "gateway"
    words = ["gateway", "--model", TINY_MODEL, "--engine", engine_url, "--port", port, "--folder", folder]
    part = Part([*words, "--operator-key", OPERATOR_KEY], tmp_path / "log.txt", ready="gateway http")
    try:
        part.start()
        part.wait_until_ready()
        yield part, f"http://127.0.0.1:{port}"
    finally:
        part.end()


async def restart(process):
    process.start()
    await asyncio.to_thread(process.wait_until_ready)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
async def test_between_two_calls_a_gateway_that_restarts_is_but_a_delay(process, way, number):
    gateway, gateway_url = process
    async with Client(gateway_url, OPERATOR_KEY) as client:
        (claim,) = await claimed(client, "r1")
        async with sandbox(client, claim, way) as url, openai_at(url, max_retries=0) as agent:
            await ask(agent, [user("hi")])
            await asyncio.to_thread(gateway.kill, number)
            call = asyncio.create_task(ask(agent, [user("hi again")]))
            await restart(gateway)
            assert (await call).choices[0].message.content == "word "
        assert len((await client.calls(["r1"]))["r1"]) == 2


async def test_a_call_that_is_held_survives_the_gateways_death_by_one_retry(process):
    gateway, gateway_url = process
    async with Client(gateway_url, OPERATOR_KEY) as client:
        (claim,) = await claimed(client, "r1")
        async with sandbox(client, claim) as url, openai_at(url, max_retries=1) as agent:
            await client.pause(drain_s=0)
            call = asyncio.create_task(ask(agent, [user("hi")]))

            async def is_held():
                return (await client.state())["held"] == 1

            await until(is_held)
            await asyncio.to_thread(gateway.kill, signal.SIGKILL)
            await restart(gateway)
            await until(is_held, timeout_s=30)
            await client.resume()
            assert (await call).choices[0].message.content == "word "
        assert len((await client.calls(["r1"]))["r1"]) == 1


@slow
async def test_a_gateway_that_is_stopped_lets_the_answer_under_way_go_out(process, engine):
    gateway, gateway_url = process
    async with Client(gateway_url, OPERATOR_KEY) as client:
        (claim,) = await claimed(client, "r1")
        async with sandbox(client, claim) as url, openai_at(url, max_retries=0) as agent:
            call = asyncio.create_task(ask(agent, [user("hi")]))

            async def runs():
                return engine.num_running == 1

            await until(runs)
            await asyncio.to_thread(gateway.kill, signal.SIGTERM)
            assert (await call).choices[0].message.content == WORDS


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


NETWORK = """
import asyncio, os, socket, sys
import httpx
from manege.client import Client
from manege.controller.sockets import AGENT_PORT, AGENT_URL, answering
from manege.sandbox.namespaces import CLONE_NEWUSER, bring_up_loopback, listen
from manege.sandbox.syscalls import drop_capabilities, syscall

async def ask():
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        answer = await http.post(AGENT_URL + "/v1/chat/completions", json=body)
        print(answer.status_code, (await http.get(AGENT_URL + "/proxy/state", headers=OPERATOR)).status_code)

async def control():
    async with Client("http://127.0.0.1:1", KEY) as client:
        (claim,) = await client.claim(controller="c", limit=1, lease_s=600)
        async with answering(client, claim) as take:
            take(listen(AGENT_PORT))
            await ask()

what, KEY, outside = sys.argv[1], sys.argv[2], socket.socket(fileno=int(sys.argv[3]))
OPERATOR = {"authorization": "Bearer " + KEY}
drop_capabilities()
syscall("unshare", CLONE_NEWUSER | 0x40000000)
bring_up_loopback()
with listen(1 if what == "control" else AGENT_PORT) as listener:
    socket.send_fds(outside, [b"l"], [listener.fileno()])
outside.recv(1)
asyncio.run(control() if what == "control" else ask())
"""
"""A process with a network of its own, which gives its listening socket away: an agent, or a controller elsewhere."""


@asynccontextmanager
async def elsewhere(what):
    """Its listening socket, and how to let it go on and hear what it said."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = [sys.executable, "-c", NETWORK, what, OPERATOR_KEY, str(theirs.fileno())]
        # A process with threads, such as numpy's, may not leave its user namespace.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        options = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "pass_fds": [theirs.fileno()]}
        process = await asyncio.create_subprocess_exec(*words, **options)
        theirs.close()
        try:
            _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, ours, 1, 1)
            if not descriptors:
                pytest.skip(f"no namespaces for ordinary users here: {(await process.communicate())[0].decode()}")

            async def go_on():
                ours.send(b"g")
                return (await process.communicate())[0].decode().split()

            yield socket.socket(fileno=descriptors[0]), go_on
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_an_ordinary_users_agent_in_a_network_of_its_own_is_answered(client, claims, store):
    async with elsewhere("agent") as (listener, go_on), answering(client, claims[0]) as take:
        take(listener)
        assert await go_on() == ["200", "403"]
    assert await count(store, "r1") == 1


async def test_a_controller_that_cannot_reach_the_gateways_door_relays(gateway, client, store):
    await client.create_rollouts([RolloutSpec(id="r1", run="r", task=Task(id="t", input={}))])
    config = uvicorn.Config(gateway.app, http="httptools", ws="none", lifespan="off", log_config=None)
    config.load()
    async with (
        elsewhere("control") as (listener, go_on),
        listening(listener, gateway.app, config=config, state=ServerState()),
    ):
        assert await go_on() == ["200", "403"]
    assert await count(store, "r1") == 1
