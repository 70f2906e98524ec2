"""What length and number cost the gateway: one conversation of 200 turns, and a thousand streams at once.

    python benchmarks/gateway_conversations.py [--turns 200] [--tokens 128000] [--streams 1000] [--delay 0.5]

The conversation is continued from the stored ids, the gateway in this process, its engine scripted: how the time of a
turn grows is what counts, and where it goes: reading the request's body is in proportion to the history, sampling and
storing to what is new. The streams come from the stand-in engine through `manege gateway`; the longest silence within
one stream says whether one stalls another, and the same without the gateway says what the machine adds.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import orjson
from gateway_latency import KEY, Connection, free_port, our_paths, process, words
from rich.console import Console

from manege.engine.scripted import ScriptedEngine
from manege.gateway.app import create_app
from manege.gateway.server import GatewayServer
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from manege.store.sql import SqlStore

NUM_SAMPLED = 200
NUM_STREAMED = 30


async def long_conversation(num_turns: int, num_tokens: int, folder: str) -> list[tuple[int, float]]:
    """Prompt tokens and seconds of each turn."""
    store = await SqlStore.open(Path(folder) / "store.db")
    answers = itertools.count()
    engine = ScriptedEngine(
        lambda _: [1000 + (next(answers) + n) % 20000 for n in range(NUM_SAMPLED)],
        chunk_size=NUM_SAMPLED,
        context_limit=2**20,
    )
    app = create_app(
        store=store,
        engine=engine,
        renderer=renderer_for(open_folder("smollm2")),
        operator_key=KEY,
        model_name="m",
        context_limit=2**20,
    )
    turns = []
    rng = random.Random(0)
    async with GatewayServer(app) as server:
        ((path, key),) = await our_paths(server.url, 1)
        connection = await Connection.open(server.url)
        messages = []
        for _ in range(num_turns):
            messages.append({"role": "user", "content": words(rng, num_tokens // num_turns - NUM_SAMPLED)})
            body = orjson.dumps({"model": "m", "messages": messages})
            begun = time.perf_counter()
            reply = orjson.loads(await connection.post(path, key, body))
            turns.append((reply["usage"]["prompt_tokens"], time.perf_counter() - begun))
            messages.append(reply["choices"][0]["message"])
        connection.transport.close()
    await store.close()
    return turns


class Stream(Connection):
    """Notes when parts of a body come."""

    def __init__(self):
        super().__init__()
        self.times = []

    def on_body(self, body):
        self.times.append(time.perf_counter())


async def streams(url: str, paths: list[tuple[str, str]]) -> list[float]:
    """The longest silence within each stream, in seconds."""

    async def one(path, key, number):
        connection = await Stream.open(url)
        content = f"conversation {number} hi"
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": content}]}
        await connection.post(path, key, orjson.dumps(body))
        connection.transport.close()
        return max(after - before for before, after in itertools.pairwise(connection.times))

    return await asyncio.gather(*(one(path, key, number) for number, (path, key) in enumerate(paths)))


async def many_streams(count: int, delay_s: float, folder: str) -> dict[str, list[float]]:
    """Longest silences, through the gateway and without it."""
    stand_in, url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    engine_command = (
        *(sys.executable, str(Path(__file__).with_name("stand_in.py")), "--port", stand_in.rpartition(":")[2]),
        *("--first", "100", "--added", "100", "--sampled", str(NUM_STREAMED), "--token-delay", str(delay_s)),
    )
    gateway_command = (
        *(str(Path(sys.executable).with_name("manege")), "gateway", "--model", "smollm2", "--engine", stand_in),
        *("--port", url.rpartition(":")[2], "--operator-key", KEY, "--folder", folder),
    )
    async with (
        process(*engine_command, health=f"{stand_in}/health"),
        process(*gateway_command, health=f"{url}/healthz"),
    ):
        alone = await streams(stand_in, [("/v1/chat/completions", "")] * count)
        paths = await our_paths(url, count)
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session:
            await session.post(f"{url}/api/models", json=[{"model": "m", "endpoint": stand_in}])
        return {"stand-in alone": alone, "gateway": await streams(url, paths)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128_000)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--delay", type=float, default=0.5, help="seconds between the tokens of a stream")
    asked = parser.parse_args()
    console = Console(highlight=False)
    if asked.turns:
        with tempfile.TemporaryDirectory() as folder:
            turns = asyncio.run(long_conversation(asked.turns, asked.tokens, folder))
        console.print(f"{asked.turns} turns up to {turns[-1][0]} prompt tokens, median ms per turn:")
        for start in range(0, len(turns), max(len(turns) // 5, 1)):
            part = turns[start : start + max(len(turns) // 5, 1)]
            console.print(
                f"  {part[0][0]:>7} tokens on  {statistics.median(seconds for _, seconds in part) * 1e3:7.1f}"
            )
    if asked.streams:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(many_streams(asked.streams, asked.delay, folder))
        console.print(
            f"{asked.streams} streams, one token per {asked.delay * 1e3:.0f} ms, longest silence in a stream:"
        )
        for name, gaps in found.items():
            console.print(f"  {name:<15} median {statistics.median(gaps) * 1e3:.0f} ms, worst {max(gaps) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
