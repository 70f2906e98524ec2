"""What the gateway costs: calls per second, added latency, memory and CPU per call, against a stand-in engine.

    python benchmarks/gateway_latency.py [--quick] [--only messages,tokens] [--shape 2000/200]
        [--reference PATH_OF_agl-server]

Three processes on one machine: the stand-in engine (`stand_in.py`), the gateway with its durable store, and this load
generator, which reads answers but does not parse them. Conversations are distinct and grow turn by turn, as agents' do.
`messages`: an engine that takes messages, its ids recorded (what Agent Lightning does); `tokens`: every call is
continued from the stored ids. `--reference` measures an Agent Lightning server in the same run.
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
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import httptools
import orjson
from rich.console import Console
from rich.table import Table
from stand_in import TEXT

from manege.client import Client
from manege.types import RolloutId, RolloutSpec, RunId, Task

KEY = "mo-benchmark"
CONTEXT_LIMIT = 8192
"""SmolLM2's: longer conversations are measured in mode `messages` only."""
NUM_TURNS = 6
NEW_TOKENS = 75
"""Of a tool's result between two answers."""


@dataclass(frozen=True)
class Shape:
    """Tokens of an average prompt and of each answer."""

    prompt: int
    sampled: int

    @property
    def added(self) -> int:
        return self.sampled + NEW_TOKENS

    @property
    def first(self) -> int:
        return self.prompt - (NUM_TURNS - 1) * self.added // 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.asynccontextmanager
async def process(*arguments: str, health: str):
    """A program, ready to serve; ended by its id."""
    log = tempfile.TemporaryFile()  # noqa: SIM115
    # The reference leaves files where it is started.
    running = await asyncio.create_subprocess_exec(*arguments, stdout=log, stderr=log, cwd=tempfile.gettempdir())
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(health):
                        break
                await asyncio.sleep(0.1)
            else:
                log.seek(0)
                raise SystemExit(f"{arguments[:3]} did not start: {log.read()[-2000:]!r}")
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.send_signal(signal.SIGINT)
        await running.wait()


def resident_kib(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def words(rng: random.Random, num_tokens: int) -> str:
    return " ".join(rng.choices(("alpha", "river", "stone", "seven", "count", "apple"), k=round(num_tokens * 0.85)))


class Connection(asyncio.Protocol):
    """One kept-alive connection of the load generator; it costs little enough not to be what is measured."""

    def __init__(self):
        self.waiter = None
        self.transport = None
        self.parser = httptools.HttpResponseParser(self)
        self.body = []

    @classmethod
    async def open(cls, url):
        parts = urlsplit(url)
        _, made = await asyncio.get_running_loop().create_connection(cls, parts.hostname, parts.port)
        return made

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_body(self, body):
        self.body.append(body)

    def on_message_complete(self):
        self.waiter.set_result(self.parser.get_status_code())

    def connection_lost(self, exc):
        if self.waiter and not self.waiter.done():
            self.waiter.set_exception(ConnectionError("the server closed the connection"))

    async def post(self, path, key, body):
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        self.waiter = asyncio.get_running_loop().create_future()
        self.body.clear()
        self.transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        status = await self.waiter
        if status != 200:
            raise SystemExit(f"{path} answered {status}: {b''.join(self.body)[:500]!r}")
        return b"".join(self.body)


class Agents:
    """Conversation after conversation, each of a rollout of its own. `paths`: URL path and key of each."""

    def __init__(self, url, shape, paths):
        self.url, self.shape = url, shape
        self.paths = iter(paths)
        self.numbers = itertools.count()
        rng = random.Random(0)
        self.texts = [orjson.dumps(words(rng, shape.first))[1:-1] for _ in range(20)]
        self.results = [orjson.dumps(words(rng, NEW_TOKENS))[1:-1] for _ in range(20)]
        self.answer = b',{"role":"assistant","content":' + orjson.dumps(TEXT) + b"}"
        self.replies = False

    async def calls(self, connection):
        while True:
            number, (path, key) = next(self.numbers), next(self.paths)
            history = b'{"role":"user","content":"conversation %d %s"}' % (number, self.texts[number % 20])
            for turn in range(NUM_TURNS):
                body = b'{"model":"m","max_tokens":1000,"messages":[%s]}' % history
                reply = await connection.post(path, key, body)
                yield
                answer = self.answer
                if self.replies:
                    answer = b"," + orjson.dumps(orjson.loads(reply)["choices"][0]["message"])
                result = self.results[(number + turn) % 20]
                history += answer + b',{"role":"user","content":"%s"}' % result


async def load(agents, *, num_connections: int, seconds: float) -> tuple[float, list[float]]:
    """Calls per second, and seconds of each call."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def worker() -> None:
        connection = await Connection.open(agents.url)
        begun = time.perf_counter()
        async for _ in agents.calls(connection):
            now = time.perf_counter()
            latencies.append(now - begun)
            if now > end:
                break
            begun = time.perf_counter()
        connection.transport.close()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_connections):
            group.create_task(worker())
    return len(latencies) / (time.perf_counter() - started), latencies


async def our_paths(url: str, count: int) -> list[tuple[str, str]]:
    """Rollouts under way, and the keys of their agents."""
    specs = [RolloutSpec(id=RolloutId(f"r{n}"), run=RunId("bench"), task=Task(id="t", input={})) for n in range(count)]
    async with Client(url, KEY) as client:
        for start in range(0, count, 500):
            await client.create_rollouts(specs[start : start + 500])
        claims = []
        while len(claims) < count:
            claims += await client.claim(controller="bench", limit=500, lease_s=3600, wait_s=1)
    return [("/v1/chat/completions", claim.agent_key) for claim in claims]


async def reference_paths(url: str, count: int) -> list[tuple[str, str]]:
    """The same on Agent Lightning's wire; its agents use the one key."""
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session:
        made = []
        for start in range(0, count, 500):
            body = [{"input": {}, "is_train": True} for _ in range(min(500, count - start))]
            async with session.post(f"{url}/api/rollouts", json=body) as response:
                made += await response.json()
    ids = [rollout["rollout_id"] for rollout in made]
    return [(f"/proxy/rollout/{id}/attempt/0/mode/train/openai/v1/chat/completions", KEY) for id in ids]


@dataclass(frozen=True)
class Measured:
    name: str
    rate: float
    single_ms: float
    kib_per_call: float
    cpu_ms: float


async def measure(name: str, agents: Agents, pid: int, seconds: float, connections: int) -> Measured:
    await load(agents, num_connections=connections, seconds=seconds / 3)
    memory, cpu = resident_kib(pid), cpu_s(pid)
    rate, latencies = await load(agents, num_connections=connections, seconds=seconds)
    memory, cpu = resident_kib(pid) - memory, cpu_s(pid) - cpu
    _, single = await load(agents, num_connections=1, seconds=seconds / 3)
    return Measured(
        name=name,
        rate=rate,
        single_ms=statistics.median(single) * 1e3,
        kib_per_call=memory / len(latencies),
        cpu_ms=cpu / len(latencies) * 1e3,
    )


async def run(asked: argparse.Namespace, shape: Shape, folder: str) -> list[Measured]:
    seconds = 3.0 if asked.quick else 15.0
    stand_in, url, reference = (f"http://127.0.0.1:{free_port()}" for _ in range(3))
    engine_command = (
        *(sys.executable, str(Path(__file__).with_name("stand_in.py")), "--port", stand_in.rpartition(":")[2]),
        *("--first", str(shape.first), "--added", str(shape.added), "--sampled", str(shape.sampled)),
    )
    gateway_command = (
        *(str(Path(sys.executable).with_name("manege")), "gateway", "--model", "smollm2", "--engine", stand_in),
        *("--port", url.rpartition(":")[2], "--operator-key", KEY, "--folder", folder),
    )
    if asked.profile:
        gateway_command = (asked.profile, "record", "-o", "gateway.svg", "-r", "500", "--", *gateway_command)
    measured = []
    async with process(*engine_command, health=f"{stand_in}/health") as engine:
        alone = Agents(stand_in, shape, itertools.repeat(("/v1/chat/completions", "")))
        measured.append(await measure("stand-in alone", alone, engine.pid, seconds, asked.connections))
        async with process(*gateway_command, health=f"{url}/healthz") as gateway:
            agents = Agents(url, shape, await our_paths(url, asked.rollouts))
            if "tokens" in asked.only and shape.prompt < CONTEXT_LIMIT / 2:
                agents.replies = True
                measured.append(await measure("tokens", agents, gateway.pid, seconds, asked.connections))
                agents.replies = False
            if "messages" in asked.only:
                async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session:
                    await session.post(f"{url}/api/models", json=[{"model": "m", "endpoint": stand_in}])
                measured.append(await measure("messages", agents, gateway.pid, seconds, asked.connections))
        if asked.reference:
            command = (
                *(asked.reference, "host=127.0.0.1", f"port={reference.rpartition(':')[2]}", f"key={KEY}"),
                "default_proxy.model_name=m",
            )
            async with process(*command, health=f"{reference}/healthz") as server:
                async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session:
                    await session.post(f"{reference}/api/models", json=[{"model": "m", "endpoint": f"{stand_in}/v1"}])
                paths = await reference_paths(reference, asked.rollouts)
                agents = Agents(reference, shape, paths)
                measured.append(await measure("reference", agents, server.pid, seconds, asked.connections))
    return measured


def shown(measured: list[Measured], shape: Shape, connections: int) -> Table:
    table = Table(title=f"{shape.prompt}-token prompts, {shape.sampled}-token answers, {connections} connections")
    for name in ("mode", "calls/s", "p50 ms, 1 connection", "added ms", "CPU ms per call", "KiB kept per call"):
        table.add_column(name)
    alone = measured[0].single_ms
    for row in measured:
        table.add_row(
            row.name,
            f"{row.rate:.0f}",
            f"{row.single_ms:.2f}",
            f"{row.single_ms - alone:.2f}",
            f"{row.cpu_ms:.2f}",
            f"{row.kib_per_call:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds instead of a minute")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--shape", action="append", help="prompt/answer tokens (default: 2000/200 and 16000/500)")
    parser.add_argument("--only", default="messages,tokens", help="modes of ours to measure")
    parser.add_argument("--rollouts", type=int, default=8000, help="conversations at most")
    parser.add_argument("--reference", help="path of an installed agl-server")
    parser.add_argument("--profile", help="path of py-spy, to profile the gateway")
    asked = parser.parse_args()
    for text in asked.shape or ("2000/200", "16000/500"):
        shape = Shape(*map(int, text.split("/")))
        with tempfile.TemporaryDirectory() as folder:
            measured = asyncio.run(run(asked, shape, folder))
        Console().print(shown(measured, shape, asked.connections))


if __name__ == "__main__":
    main()
