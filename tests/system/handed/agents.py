"""Agents whose gateway is a listening socket: handed over to a gateway, or relayed to it."""

import asyncio
import socket
from contextlib import ExitStack, asynccontextmanager, suppress

import httpx
import openai
import pytest

from manege.controller.relay import relay
from manege.controller.sockets import answering
from manege.types import RolloutSpec, Task
from tests.system.agents.asking import user

WORDS = "word " * 40
"""200 tokens, which take a second."""
WAYS = ["handed over", "relayed"]


slow = pytest.mark.parametrize("engine", [0.005], indirect=True, ids=["slow"])


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


@asynccontextmanager
async def openai_at(url, key="none", **options):
    http_client = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http_client, **options) as made:
        yield made


def chat(http, path="/v1/chat/completions", **options):
    return http.post(path, json={"model": "m", "messages": [user("hi")]}, **options)


async def count(store, name):
    return len((await store.calls([name]))[name])
