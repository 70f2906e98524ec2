"""A server that hangs fails what waits for it; one that is only silent does not."""

import asyncio
import contextlib
import signal
import time

import pytest

from manege.engine.base import Sampling, Weights, collect
from manege.engine.http1 import HttpClient
from manege.engine.upstream import UpstreamEngine
from manege.errors import EngineAwayError
from manege.types import PolicyVersion
from tests.system.kill.checks import check
from tests.system.kill.processes import Part, until
from tests.system.kill.site import MODEL, Site, free_port

pytestmark = pytest.mark.anyio

FAILED_WITHIN_S = 30
LONGER_THAN_QUIET_S = 12
FIVE = Sampling(max_new_tokens=5)


@contextlib.asynccontextmanager
async def raw_server(handle):
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def say_nothing(reader, writer):
    with contextlib.closing(writer):
        await reader.read()


async def answer_other_paths_only(reader, writer):
    """Takes its time for an answer, and knows no /health."""
    with contextlib.closing(writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"GET /health"):
            await asyncio.sleep(FAILED_WITHIN_S - 10)
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        await reader.read()


async def failed_after_s(url):
    client, began_s = HttpClient(url), time.monotonic()
    try:
        with pytest.raises(EngineAwayError, match="hangs"):
            await asyncio.gather(client.request("POST", "/slow"), client.request("POST", "/slow"))
        return time.monotonic() - began_s
    finally:
        await client.close()


async def answered(url):
    client = HttpClient(url)
    try:
        return await client.request("POST", "/slow")
    finally:
        await client.close()


async def test_a_server_that_never_answers_is_given_up_and_one_that_is_slow_is_not():
    async with raw_server(say_nothing) as black_hole, raw_server(answer_other_paths_only) as slow:
        seconds, (status, _) = await asyncio.gather(failed_after_s(black_hole), answered(slow))
    assert LONGER_THAN_QUIET_S < seconds < FAILED_WITHIN_S
    assert status == 404


@contextlib.contextmanager
def engine_process(folder):
    port = free_port()
    part = Part(["engine", "--model", MODEL, "--port", port], folder / "engine.txt", ready="engine http")
    part.start()
    try:
        part.wait_until_ready()
        yield part, f"http://127.0.0.1:{port}"
    finally:
        part.end()


@pytest.mark.full
async def test_calls_of_a_paused_engine_wait_and_those_of_a_frozen_one_fail(tmp_path):
    with engine_process(tmp_path) as (process, url):
        engine = UpstreamEngine(url)
        try:
            await engine.pause()
            calls = [asyncio.create_task(collect(engine.generate([5, 6], FIVE))) for _ in range(3)]
            await asyncio.sleep(LONGER_THAN_QUIET_S)
            assert not any(call.done() for call in calls)
            process.send(signal.SIGSTOP)
            async with asyncio.timeout(FAILED_WITHIN_S):
                ended = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(error, EngineAwayError) for error in ended), ended
            process.send(signal.SIGCONT)
            await engine.resume()
            assert len((await collect(engine.generate([5, 6], FIVE))).ids_R) > 0
        finally:
            await engine.close()


@pytest.mark.full
async def test_an_engine_that_was_restarted_gets_the_last_weights_again(tmp_path):
    with engine_process(tmp_path) as (process, url):
        engine = UpstreamEngine(url)
        try:
            await engine.load(Weights(kind="folder", folder=str(MODEL)), PolicyVersion(3))
            assert (await engine.info()).version == 3
            process.kill(signal.SIGKILL)
            with pytest.raises(EngineAwayError):
                await collect(engine.generate([5, 6], FIVE))
            process.start()
            process.wait_until_ready()
            spans = (await collect(engine.generate([5, 6], FIVE))).spans
            assert [span.version for span in spans] == [3]
        finally:
            await engine.close()


@pytest.mark.full
def test_attempts_of_an_engine_that_hangs_are_nobodys_fault_and_made_again(tmp_path):
    with Site(tmp_path, apart=True) as site:
        site.order("busy")
        site.start()
        until(lambda: site.state()["inflight"], "a call")
        site.parts["engine"].send(signal.SIGSTOP)
        second_attempts = (site.agents / "rollouts").glob
        until(lambda: list(second_attempts("*/1")), "another attempt", timeout_s=FAILED_WITHIN_S)
        site.release()
        site.finish()
        check(site)
