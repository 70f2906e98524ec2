"""Whether a gateway stays as small and as quick as it began: many calls of rollouts that come and end.

    python benchmarks/soak.py [--calls 100000] [--mode tokens|messages]

Three processes on one machine: the stand-in engine, the gateway with its durable store on SQLite, and 32 agents here.
Each creates a rollout, claims one, makes 5 to 10 calls of one growing conversation and ends it, over and over. Printed
per tenth: resident memory of the gateway, p95 latency, calls per second. Ends with 1 when memory grows by more than
64 KiB per 1,000 calls over the last half, or when p95 of the last tenth is above 1.5 times that of the second.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
from gateway_latency import KEY, NEW_TOKENS, Connection, free_port, process, resident_kib, words

from manege.client import Client
from manege.store.base import Ending
from manege.types import Outcome, RolloutId, RolloutSpec, RunId, Task

NUM_AGENTS = 32
NUM_TURNS = (5, 10)
FIRST, SAMPLED = 400, 50
"""Tokens of a conversation's first prompt, and of each answer."""
MAX_SLOPE_KIB = 64.0
"""Per 1,000 calls."""
MAX_SLOWDOWN = 1.5


@dataclass(frozen=True)
class Tenth:
    """What was measured at the end of each tenth of the calls."""

    calls: int
    resident_kib: int
    p95_ms: float
    rate: float


class Soak:
    """Agents that make calls until there were enough."""

    def __init__(self, client: Client, url: str, pid: int, num_calls: int) -> None:
        self.client, self.url, self.pid, self.num_calls = client, url, pid, num_calls
        self.numbers = itertools.count()
        self.tenths: list[Tenth] = []
        self.latencies: list[float] = []
        self.num_made = 0
        self.begun = time.perf_counter()
        self.text = words(random.Random(0), FIRST)

    async def agent(self) -> None:
        connection = await Connection.open(self.url)
        while self.num_made < self.num_calls:
            await self.rollout(connection)
        connection.transport.close()

    async def rollout(self, connection: Connection) -> None:
        number = next(self.numbers)
        await self.client.create_rollouts(
            [RolloutSpec(id=RolloutId(f"r{number}"), run=RunId("soak"), task=Task(id="t", input={}))]
        )
        (claim,) = await self.client.claim(controller="soak", limit=1, lease_s=600, wait_s=10)
        messages = [{"role": "user", "content": f"conversation {number} {self.text}"}]
        rng = random.Random(number)
        for _ in range(rng.randint(*NUM_TURNS)):
            body = orjson.dumps({"model": "m", "messages": messages})
            begun = time.perf_counter()
            reply = await connection.post("/v1/chat/completions", claim.agent_key, body)
            self.note(time.perf_counter() - begun)
            messages += [
                orjson.loads(reply)["choices"][0]["message"],
                {"role": "user", "content": words(rng, NEW_TOKENS)},
            ]
        await self.client.finish(
            claim.rollout.spec.id, claim.rollout.attempt, Ending(outcome=Outcome.OK, reward=rng.random())
        )

    def note(self, latency_s: float) -> None:
        self.latencies.append(latency_s)
        self.num_made += 1
        size = self.num_calls // 10
        if self.num_made % size == 0 and len(self.tenths) < 10:
            now = time.perf_counter()
            p95_ms = statistics.quantiles(self.latencies, n=20)[-1] * 1e3
            tenth = Tenth(self.num_made, resident_kib(self.pid), p95_ms, size / (now - self.begun))
            print(
                f"{tenth.calls:>8} calls   {tenth.resident_kib / 1024:7.1f} MiB   p95 {tenth.p95_ms:6.1f} ms"
                f"   {tenth.rate:5.0f} calls/s",
                flush=True,
            )
            self.tenths.append(tenth)
            self.latencies, self.begun = [], now


async def run(asked: argparse.Namespace, folder: str) -> list[Tenth]:
    stand_in, url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    engine_command = (
        *(sys.executable, str(Path(__file__).with_name("stand_in.py")), "--port", stand_in.rpartition(":")[2]),
        *("--first", str(FIRST), "--added", str(SAMPLED + NEW_TOKENS), "--sampled", str(SAMPLED)),
        *("--max-turns", str(NUM_TURNS[1] + 1)),
    )
    gateway_command = (
        *(str(Path(sys.executable).with_name("manege")), "gateway", "--model", "smollm2", "--engine", stand_in),
        *("--port", url.rpartition(":")[2], "--operator-key", KEY, "--folder", folder),
    )
    async with (
        process(*engine_command, health=f"{stand_in}/health"),
        process(*gateway_command, health=f"{url}/healthz") as gateway,
        Client(url, KEY) as client,
    ):
        if asked.mode == "messages":
            async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session:
                await session.post(f"{url}/api/models", json=[{"model": "m", "endpoint": stand_in}])
        soak = Soak(client, url, gateway.pid, asked.calls)
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_AGENTS):
                group.create_task(soak.agent())
        return soak.tenths


def verdict(tenths: list[Tenth]) -> int:
    """What the numbers say, and the exit code."""
    last = tenths[4:]
    slope = statistics.linear_regression([t.calls / 1000 for t in last], [t.resident_kib for t in last]).slope
    slowdown = tenths[-1].p95_ms / tenths[1].p95_ms
    print(f"memory: {slope:+.1f} KiB per 1,000 calls over the last half (at most {MAX_SLOPE_KIB:g})")
    print(f"p95: the last tenth is {slowdown:.2f} times the second (at most {MAX_SLOWDOWN:g})")
    return int(slope > MAX_SLOPE_KIB or slowdown > MAX_SLOWDOWN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--mode", choices=["tokens", "messages"], default="tokens", help="what the engine takes")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tenths = asyncio.run(run(asked, folder))
    return verdict(tenths)


if __name__ == "__main__":
    sys.exit(main())
