"""What a rollout of T turns costs, on disk and in the gateway's memory: its new tokens, whatever its length.

    python benchmarks/storage_growth.py [--turns 10,50,200] [--reference PATH_OF_agl-server]

Per T the same number of calls, as fewer and longer conversations: each call sends the whole history and 30 KB of tool
schemas, as harnesses do, to a gateway over the stand-in engine (`stand_in.py`, messages with ids). Printed per call:
bytes of the database that are in use, growth of resident memory. `--reference` measures an Agent Lightning server,
which keeps everything in memory, in the same run.
"""

import argparse
import asyncio
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import aiohttp
import orjson
from gateway_latency import KEY, NEW_TOKENS, Connection, free_port, our_paths, process, reference_paths, resident_kib
from rich.console import Console
from rich.table import Table
from stand_in import TEXT

NUM_CALLS = 1600
WARM_UP = 160
FIRST, SAMPLED = 400, 40
"""Tokens of a conversation's first prompt, and of each answer."""
TOOLS = [
    {
        "type": "function",
        "function": {"name": f"tool{n}", "description": f"{n} " * 700, "parameters": {"type": "object"}},
    }
    for n in range(15)
]


async def converse(url, path, key, number, num_turns):
    """One conversation."""
    connection = await Connection.open(url)
    messages = [{"role": "user", "content": f"conversation {number} " + "word " * FIRST}]
    for turn in range(num_turns):
        body = {"model": "m", "max_tokens": 1000, "messages": messages, "tools": TOOLS}
        await connection.post(path, key, orjson.dumps(body))
        result = f"result {number} {turn} " + "word " * NEW_TOKENS
        messages += [{"role": "assistant", "content": TEXT}, {"role": "user", "content": result}]
    connection.transport.close()


async def grow(url, pid, paths, num_turns):
    """KiB of resident memory per call, after a warm-up."""
    await asyncio.gather(*[converse(url, *paths.pop(), n, 10) for n in range(WARM_UP // 10)])
    before = resident_kib(pid)
    for _ in range(NUM_CALLS // num_turns // 8 or 1):
        some = [paths.pop() for _ in range(min(8, NUM_CALLS // num_turns))]
        await asyncio.gather(*[converse(url, *path, 100 + len(paths) + n, num_turns) for n, path in enumerate(some)])
    return (resident_kib(pid) - before) / NUM_CALLS


def used_kib(path):
    """Of an SQLite database: pages that hold something, its log apart."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * size / 1024


async def ours(stand_in, num_turns, folder):
    url = f"http://127.0.0.1:{free_port()}"
    command = (
        *(str(Path(sys.executable).with_name("manege")), "gateway", "--model", "smollm2", "--engine", stand_in),
        *("--port", url.rpartition(":")[2], "--operator-key", KEY, "--folder", folder),
    )
    async with process(*command, health=f"{url}/healthz") as gateway:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session:
            await session.post(f"{url}/api/models", json=[{"model": "m", "endpoint": stand_in}])
        paths = await our_paths(url, WARM_UP // 10 + NUM_CALLS // num_turns)
        memory = await grow(url, gateway.pid, paths, num_turns)
    return memory, used_kib(Path(folder, "manege.db")) / (NUM_CALLS + WARM_UP)


async def reference(program, stand_in, num_turns):
    url = f"http://127.0.0.1:{free_port()}"
    command = (program, "host=127.0.0.1", f"port={url.rpartition(':')[2]}", f"key={KEY}", "default_proxy.model_name=m")
    async with process(*command, health=f"{url}/healthz") as server:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session:
            await session.post(f"{url}/api/models", json=[{"model": "m", "endpoint": f"{stand_in}/v1"}])
        paths = await reference_paths(url, WARM_UP // 10 + NUM_CALLS // num_turns)
        return await grow(url, server.pid, paths, num_turns)


async def run(asked):
    table = Table(title=f"per call, {NUM_CALLS} calls; prompts from {FIRST} tokens on, {NEW_TOKENS + SAMPLED} a turn")
    for name in ("turns", "mean prompt tokens", "disk KiB", "memory KiB", "reference: memory KiB"):
        table.add_column(name, justify="right")
    stand_in = f"http://127.0.0.1:{free_port()}"
    command = (
        *(sys.executable, str(Path(__file__).with_name("stand_in.py")), "--port", stand_in.rpartition(":")[2]),
        *("--first", str(FIRST), "--added", str(NEW_TOKENS + SAMPLED), "--sampled", str(SAMPLED), "--max-turns", "200"),
    )
    async with process(*command, health=f"{stand_in}/health"):
        for num_turns in map(int, asked.turns.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                memory, disk = await ours(stand_in, num_turns, folder)
            theirs = await reference(asked.reference, stand_in, num_turns) if asked.reference else None
            mean = FIRST + (num_turns - 1) * (NEW_TOKENS + SAMPLED) / 2
            shown = "" if theirs is None else f"{theirs:.0f}"
            table.add_row(str(num_turns), f"{mean:.0f}", f"{disk:.2f}", f"{memory:.2f}", shown)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", default="10,50,200")
    parser.add_argument("--reference", help="path of an installed agl-server")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
