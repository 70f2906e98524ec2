"""Several engines by their addresses, in a run file and on the command line: all serve, pause and get weights."""

import asyncio
import os
from contextlib import AsyncExitStack

import pytest

from manege.client import Client
from manege.engine.base import Weights
from tests.conftest import OPERATOR_KEY, TINY_MODEL
from tests.system.test_gateway_pool import serving_engine
from tests.system.test_parts_alone import TINY
from tests.system.test_pause_restart import ask
from tests.system.test_several_gateways import agent, begin
from tests.system.test_training import RUN_FILE, finish, manege

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


async def engines_of(stack, letters):
    """Engines behind sockets that answer with these letters, and their addresses."""
    served = [await stack.enter_async_context(serving_engine(letter)) for letter in letters]
    return [engine for engine, _ in served], [url for _, url in served]


async def address(process):
    """That a gateway prints when it serves."""
    async with asyncio.timeout(60):
        line = await asyncio.to_thread(process.stderr.readline)
    return line.split("gateway ")[1].split(",")[0]


async def test_engines_named_on_the_command_line_serve_pause_and_get_weights(tmp_path):
    async with AsyncExitStack() as stack:
        engines, urls = await engines_of(stack, "xy")
        words = ["--model", TINY_MODEL, "--port", 0, "--folder", tmp_path, "--operator-key", OPERATOR_KEY]
        process = manege("gateway", *words, "--engine", urls[0], "--engine", urls[1])
        try:
            url = await address(process)
            client = await stack.enter_async_context(Client(url, OPERATOR_KEY))
            agents = {}
            for name in (names := [f"r{number}" for number in range(16)]):
                agents[name] = await stack.enter_async_context(agent(client, await begin(client, name)))
            said = [(await ask(each)).choices[0].message.content for each in agents.values()]
            assert set(said) == {"x" * 8, "y" * 8}
            assert (await client.pause(drain_s=1))["engine"]["weights"] == ["folder"]
            assert [(await engine.info()).paused for engine in engines] == [True, True]
            await client.publish(Weights(kind="folder", folder="/weights"))
            await client.resume()
            assert [((await each.info()).paused, (await each.info()).version) for each in engines] == [(False, 1)] * 2
            assert [(await ask(each)).choices[0].message.content for each in agents.values()] == said
            calls = await client.calls(names)
            assert [[span.version for span in calls[name][-1].spans] for name in names] == [[1]] * 16
        finally:
            process.kill()
            await asyncio.to_thread(process.communicate)


async def test_engines_named_in_a_run_file_both_serve_it(tmp_path):
    async with AsyncExitStack() as stack:
        engines, urls = await engines_of(stack, "xy")
        words = ["eval", RUN_FILE, f"gateway.engine_url={urls}".replace("'", '"'), "tasks.num_heldout=16", "--unsafe"]
        process = manege(*words, env={**os.environ, "PYTHONPATH": str(TINY)})
        code, _, err = await asyncio.to_thread(finish, process, 60)
        assert code == 0, err
        assert all([(await engine.info()).stats["sampled"] for engine in engines])
