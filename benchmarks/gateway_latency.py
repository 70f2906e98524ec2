"""What the gateway costs: calls per second, added latency, memory kept per call, against a stand-in engine.

    python benchmarks/gateway_latency.py [--quick]

Three processes on one machine: the stand-in engine (scripted, on the token wire), `manege gateway` with its durable
store, and this load generator. Conversations are distinct and grow turn by turn around 2,000 prompt tokens with
200-token answers, as agents' do; every call is continued from the stored ids. The stand-in engine alone, asked by the
same generator with prompts of the same length, is the limit.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import orjson
import uvicorn
from rich.console import Console
from rich.table import Table

from manege.client import Client
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.server import engine_app
from manege.types import RolloutId, RolloutSpec, RunId, Task

NUM_SAMPLED = 200
FIRST_WORDS = 1150
"""Of a conversation's first message; a word is a token or a little more."""
TURN_WORDS = 75
NUM_TURNS = 6
PROMPT_TOKENS = 2000
KEY = "mo-benchmark"
END = 2


def serve_engine(port: int) -> None:
    """The stand-in engine, in its own process."""
    reply = hashed_reply(num_tokens=NUM_SAMPLED - 1, first_id=1000, last_id=20000, end=[END])
    engine = ScriptedEngine(reply, chunk_size=NUM_SAMPLED, context_limit=8192)
    app = engine_app(engine, encode=lambda text: [], decode=lambda ids: "")
    uvicorn.run(app, port=port, log_level="warning", access_log=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.asynccontextmanager
async def process(*arguments: str, health: str):
    """A program of ours, ready to serve; ended by its id."""
    running = await asyncio.create_subprocess_exec(*arguments)
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(health):
                        break
                await asyncio.sleep(0.1)
            else:
                raise SystemExit(f"{arguments[1:3]} did not start")
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.send_signal(signal.SIGINT)
        await running.wait()


def resident_kib(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(("alpha", "river", "stone", "seven", "count", "apple")) for _ in range(count))


async def post(session: aiohttp.ClientSession, url: str, body: dict, headers: dict) -> dict:
    async with session.post(url, data=orjson.dumps(body), headers=headers) as response:
        reply = await response.read()
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {reply[:300]!r}")
        return orjson.loads(reply)


class EngineCaller:
    """Calls of the stand-in engine alone, each with a prompt of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.numbers = itertools.count()

    async def connection(self, session):
        while True:
            prompt = [next(self.numbers) % 30000, *range(3, PROMPT_TOKENS + 2)]
            params = {"max_tokens": NUM_SAMPLED + 50, "stop_token_ids": [END], "logprobs": 0}
            await post(
                session, f"{self.url}/inference/v1/generate", {"token_ids": prompt, "sampling_params": params}, {}
            )
            yield PROMPT_TOKENS


class GatewayCaller:
    """Agents: conversation after conversation, each with the key of a rollout of its own."""

    def __init__(self, url: str, keys: list[str]) -> None:
        self.url = url
        self.keys = iter(keys)
        self.numbers = itertools.count()

    async def connection(self, session):
        while True:
            rng = random.Random(next(self.numbers))
            headers = {"authorization": f"Bearer {next(self.keys)}", "content-type": "application/json"}
            messages = [{"role": "user", "content": words(rng, FIRST_WORDS)}]
            for _ in range(NUM_TURNS):
                body = {"model": "m", "messages": messages, "max_tokens": NUM_SAMPLED + 50}
                reply = await post(session, f"{self.url}/v1/chat/completions", body, headers)
                message = reply["choices"][0]["message"]
                messages += [message, {"role": "user", "content": words(rng, TURN_WORDS)}]
                yield reply["usage"]["prompt_tokens"]


async def load(caller, *, num_connections: int, seconds: float) -> tuple[float, list[float], list[int]]:
    """Calls per second, seconds of each call, prompt tokens of each call."""
    latencies: list[float] = []
    prompts: list[int] = []
    end = time.perf_counter() + seconds

    async def worker(session: aiohttp.ClientSession) -> None:
        begun = time.perf_counter()
        async for num_prompt in caller.connection(session):
            now = time.perf_counter()
            latencies.append(now - begun)
            prompts.append(num_prompt)
            if now > end:
                return
            begun = now

    started = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as group:
        for _ in range(num_connections):
            group.create_task(worker(session))
    return len(latencies) / (time.perf_counter() - started), latencies, prompts


async def make_keys(url: str, count: int) -> list[str]:
    """Rollouts under way, and the keys of their agents."""
    specs = [RolloutSpec(id=RolloutId(f"r{n}"), run=RunId("bench"), task=Task(id="t", input={})) for n in range(count)]
    async with Client(url, KEY) as client:
        for start in range(0, count, 500):
            await client.create_rollouts(specs[start : start + 500])
        claims = []
        while len(claims) < count:
            claims += await client.claim(controller="bench", limit=500, lease_s=3600, wait_s=1)
    return [claim.agent_key for claim in claims]


async def measure(seconds: float, num_connections: int, folder: str) -> Table:
    engine_url, url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    engine_command = (sys.executable, __file__, "--engine-port", engine_url.rpartition(":")[2])
    gateway_command = (
        *(str(Path(sys.executable).with_name("manege")), "gateway", "--model", "smollm2", "--engine", engine_url),
        *("--port", url.rpartition(":")[2], "--key", KEY, "--folder", folder),
    )
    async with (
        process(*engine_command, health=f"{engine_url}/health"),
        process(*gateway_command, health=f"{url}/healthz") as gateway,
    ):
        keys = await make_keys(url, 4000)
        engine, agents = EngineCaller(engine_url), GatewayCaller(url, keys)
        await load(engine, num_connections=num_connections, seconds=seconds / 4)
        await load(agents, num_connections=num_connections, seconds=seconds / 2)
        before = resident_kib(gateway.pid)
        rate, _, prompts = await load(agents, num_connections=num_connections, seconds=seconds)
        per_call = (resident_kib(gateway.pid) - before) / len(prompts)
        engine_rate, *_ = await load(engine, num_connections=num_connections, seconds=seconds)
        _, engine_single, _ = await load(engine, num_connections=1, seconds=seconds / 2)
        _, single, _ = await load(agents, num_connections=1, seconds=seconds / 2)
    table = Table(title=f"gateway, {statistics.mean(prompts):.0f}-token prompts, {NUM_SAMPLED}-token answers")
    for name in ("what", "gateway", "stand-in engine alone"):
        table.add_column(name)
    latency, alone = statistics.median(single) * 1e3, statistics.median(engine_single) * 1e3
    table.add_row(f"calls/s, {num_connections} connections", f"{rate:.0f}", f"{engine_rate:.0f}")
    table.add_row("p50 ms, 1 connection", f"{latency:.2f}", f"{alone:.2f}")
    table.add_row("p50 ms added", f"{latency - alone:.2f}", "")
    table.add_row("KiB resident kept per call", f"{per_call:.1f}", f"over {len(prompts)} calls")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds instead of a minute")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--engine-port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine_port:
        serve_engine(arguments.engine_port)
        return
    with tempfile.TemporaryDirectory() as folder:
        table = asyncio.run(measure(2.0 if arguments.quick else 15.0, arguments.connections, folder))
    Console().print(table)


if __name__ == "__main__":
    main()
