"""Sockets are taken from who may give them, served while they are given, and let go."""

import asyncio
import socket
from contextlib import closing
from dataclasses import replace

import httpx
import pytest

from manege.errors import UnauthorizedError
from tests.conftest import OPERATOR_KEY
from tests.system.agents.asking import ask, user
from tests.system.handed.agents import WAYS, chat, claimed, openai_at, sandbox

pytestmark = pytest.mark.anyio


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
    # httpcore closes a connection that expires between its choice and its use.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=None)
    async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits) as http:
        await asyncio.gather(*map(run, await claimed(client, *names)))
    assert {name: len(calls) for name, calls in (await store.calls(names)).items()} == dict.fromkeys(names, 2)
