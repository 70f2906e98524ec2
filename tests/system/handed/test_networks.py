"""Agents, and controllers, with a network of their own."""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import uvicorn
from uvicorn.server import ServerState

from manege.controller.sockets import AGENT_PORT, AGENT_URL, answering
from manege.listening import listening
from manege.sandbox.launcher import Launcher
from manege.sandbox.spec import Limits
from manege.types import RolloutSpec, Task
from tests.conftest import OPERATOR_KEY
from tests.system.handed.agents import count
from tests.system.test_sandbox import LAYERS, Box

pytestmark = pytest.mark.anyio


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


AGENT = """
import os, socket, sys
import openai
from urllib.request import Request, urlopen
from urllib.error import HTTPError

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
print(answer.choices[0].message.content)
try:
    urlopen(Request(sys.argv[1] + "/proxy/state", headers={"authorization": "Bearer " + sys.argv[2]}))
except HTTPError as error:
    print(error.code)
for port in map(int, sys.argv[3:]):
    try:
        socket.create_connection(("127.0.0.1", port), 5)
    except OSError as error:
        print(error.errno == 111)
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    door.connect("\\0" + os.environ["DOOR"])
except OSError as error:
    print(error.errno == 111)
"""


@pytest.mark.skipif(not LAYERS.namespaces, reason="; ".join(LAYERS.missing()))
async def test_the_sandbox_reaches_the_gateway_by_its_socket_and_nothing_else(gateway, client, claims, store, tmp_path):
    box, port = Box(tmp_path), urlsplit(gateway.url).port
    program = [sys.executable, "-c", AGENT, AGENT_URL, OPERATOR_KEY, str(port)]
    spec = box.spec(program, env={"DOOR": await client.door()}, limits=Limits())
    assert spec.policy is not None
    spec = replace(spec, policy=replace(spec.policy, tcp_ports=(), listen_port=AGENT_PORT))
    launcher = Launcher()
    try:
        async with answering(client, claims[0]) as take:
            ended = await launcher.run(spec, 60, on_listener=take)
    finally:
        await launcher.close()
    assert (box.stdout.splitlines(), box.stderr, ended.code) == (["word ", "403", "True", "True"], "", 0)
    assert (await count(store, "r1"), await count(store, "r2")) == (1, 0)
