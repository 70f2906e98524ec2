"""What workers of one gateway add, over PostgreSQL: calls per second, and whose CPU a call costs.

    python benchmarks/gateway_workers.py [--quick] [--rounds 3] [--only tokens,messages] [--shape 2000/200]
    python benchmarks/gateway_workers.py --plan gpus=64 prompt=16000      # what so many GPUs need (gateway_plan.py)

As `gateway_latency.py`: a stand-in engine, distinct conversations that grow, answers that are not parsed here. All
share this machine's cores, so a second worker helps as far as the others leave it room: the CPU time per call of each
party says what is possible. `hopping`: an agent changes its worker at every call, so that each reads from the store
what the other has served; otherwise a conversation stays with the worker that has its connection.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import aiohttp
import psycopg
from gateway_latency import KEY, Agents, Connection, Shape, cpu_s, free_port, our_paths, process
from gateway_plan import main as plan
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import postgres

MODES = {"tokens": 1, "tokens, hopping": 2, "messages": 1}
"""Connections of an agent, of which it uses one after the other."""


class Alternating:
    """As one connection."""

    def __init__(self, connections):
        self._all, self._next = connections, itertools.cycle(connections)

    async def post(self, *words):
        return await next(self._next).post(*words)

    def close(self):
        for connection in self._all:
            connection.transport.close()


async def load(agents, *, num_connections, of_each, seconds):
    """Calls, and how long they took in all."""
    num_calls, end = 0, time.perf_counter() + seconds
    # Opened one after the other, so that those of an agent are with different workers.
    opened = [Alternating([await Connection.open(agents.url) for _ in range(of_each)]) for _ in range(num_connections)]

    async def worker(connection):
        nonlocal num_calls
        async for _ in agents.calls(connection):
            num_calls += 1
            if time.perf_counter() > end:
                break
        connection.close()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for connection in opened:
            group.create_task(worker(connection))
    return num_calls, time.perf_counter() - started


def below(pid):
    """Its children."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(name))
    return found


def cpu_s_if_there(pid):
    """PostgreSQL's own helpers come and go."""
    try:
        return cpu_s(pid)
    except OSError:
        return 0.0


@dataclass(frozen=True)
class Spent:
    """So far, or per call: seconds of CPU, bytes, transactions."""

    generator: float
    engine: float
    first: float
    workers: float
    postgres: float
    log: float
    tables: float
    commits: float
    turn: float = 0.0
    """Seconds in which other writers were kept out."""

    @classmethod
    def now(cls, engine, gateway, workers, server):
        master = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
        with psycopg.connect(server.url) as connection:
            log, tables, commits = connection.execute(
                "SELECT pg_current_wal_lsn() - '0/0', pg_database_size(current_database()), xact_commit "
                "FROM pg_stat_database WHERE datname = current_database()"
            ).fetchone()
        return cls(
            generator=time.process_time(),
            engine=cpu_s(engine),
            first=cpu_s(gateway) if workers else 0.0,
            workers=sum(map(cpu_s, workers or [gateway])),
            postgres=cpu_s(master) + sum(map(cpu_s_if_there, below(master))),
            log=float(log),
            tables=float(tables),
            commits=float(commits),
        )

    def per_call(self, before, num_calls):
        names = [field.name for field in fields(self)]
        return Spent(**{name: (getattr(self, name) - getattr(before, name)) / num_calls for name in names})


class Turns:
    """How much of the time some writer has its turn, by looking: the advisory lock of `store/postgres.py` is held."""

    def __init__(self, url):
        self._url, self._seen, self._ended = url, [], threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    @property
    def share(self):
        return statistics.fmean(self._seen or [0.0])

    def _look(self):
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._ended.wait(0.01):
                self._seen.append(float(connection.execute(held).fetchone()[0] > 0))


async def measure(mode, workers, shape, asked, server):
    """Calls per second, and what each cost."""
    stand_in, url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    engine_command = (
        *(sys.executable, str(Path(__file__).with_name("stand_in.py")), "--port", stand_in.rpartition(":")[2]),
        *("--first", str(shape.first), "--added", str(shape.added), "--sampled", str(shape.sampled)),
    )
    with tempfile.TemporaryDirectory() as folder, postgres.schema(server.url) as database:
        gateway_command = (
            *(str(Path(sys.executable).with_name("manege")), "gateway", "--model", "smollm2", "--engine", stand_in),
            *("--port", url.rpartition(":")[2], "--operator-key", KEY, "--folder", folder, "--store", database),
            *("--workers", str(workers)),
        )
        async with (
            process(*engine_command, health=f"{stand_in}/health") as engine,
            process(*gateway_command, health=f"{url}/healthz") as gateway,
        ):
            if mode == "messages":
                headers, models = {"authorization": f"Bearer {KEY}"}, [{"model": "m", "endpoint": stand_in}]
                async with (
                    aiohttp.ClientSession(headers=headers) as session,
                    session.post(f"{url}/api/models", json=models) as answered,
                ):
                    answered.raise_for_status()
            agents = Agents(url, shape, await our_paths(url, asked.rollouts))
            agents.replies = mode != "messages"
            how = {"num_connections": asked.connections, "of_each": MODES[mode]}
            seconds = 3.0 if asked.quick else 12.0
            await load(agents, seconds=seconds / 3, **how)
            parties = engine.pid, gateway.pid, below(gateway.pid), server
            before = Spent.now(*parties)
            with Turns(server.url) as turns:
                num_calls, took_s = await load(agents, seconds=seconds, **how)
            spent = replace(Spent.now(*parties), turn=turns.share * took_s).per_call(before, num_calls)
    return num_calls / took_s, spent


def told(spent):
    """In one line, for whoever cannot wait for the table."""
    cpu = {name: getattr(spent, name) * 1e3 for name in ("workers", "first", "postgres", "engine", "generator", "turn")}
    return "ms " + ", ".join(f"{name} {value:.2f}" for name, value in cpu.items())


def shown(results, shape, connections):
    table = Table(title=f"{shape.prompt}-token prompts, {shape.sampled}-token answers, {connections} agents; medians")
    for name in ("mode", "workers", "calls/s", "of the rounds", "ms CPU: workers", "first", "PostgreSQL", "engine"):
        table.add_column(name)
    for name in ("generator", "sum", "ms turn", "commits", "KiB log", "KiB tables", "load"):
        table.add_column(name)
    for (mode, workers), rounds in results.items():
        rates = [rate for rate, _, _ in rounds]

        def median(name, rounds=rounds):
            return statistics.median(getattr(spent, name) for _, spent, _ in rounds)

        cpu = [median(name) * 1e3 for name in ("workers", "first", "postgres", "engine", "generator")]
        table.add_row(
            *(mode, str(workers), f"{statistics.median(rates):.0f}", " ".join(f"{rate:.0f}" for rate in rates)),
            *(f"{value:.2f}" for value in [*cpu, sum(cpu), median("turn") * 1e3, median("commits")]),
            *(f"{median(name) / 1024:.1f}" for name in ("log", "tables")),
            f"{statistics.median(load for _, _, load in rounds):.1f}",
        )
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs="*", metavar="INPUT=NUMBER", help="no measurement: what so many GPUs need")
    parser.add_argument("--quick", action="store_true", help="3 seconds each instead of 12")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--shape", action="append", help="prompt/answer tokens (default: 2000/200)")
    parser.add_argument("--only", default="tokens/tokens, hopping/messages", help="modes, by slashes")
    parser.add_argument("--workers", default="1,2", help="numbers of workers")
    parser.add_argument("--rollouts", type=int, default=4000, help="conversations at most")
    asked = parser.parse_args()
    if asked.plan is not None:
        plan(asked.plan)
        return
    console = Console(width=200)
    for text in asked.shape or ["2000/200"]:
        shape, results = Shape(*map(int, text.split("/"))), {}
        with postgres.server() as server:
            numbers = [int(number) for number in asked.workers.split(",")]
            cases = [(mode, workers) for mode in asked.only.split("/") for workers in numbers]
            # Hopping needs somewhere to hop.
            cases = [(mode, workers) for mode, workers in cases if MODES[mode] <= workers]
            # Round by round, so that a machine that is busier for a while is so for all.
            for number, (mode, workers) in itertools.product(range(asked.rounds), cases):
                rate, spent = asyncio.run(measure(mode, workers, shape, asked, server))
                results.setdefault((mode, workers), []).append((rate, spent, os.getloadavg()[0]))
                console.print(f"round {number + 1}: {mode}, {workers} workers: {rate:.0f} calls/s; {told(spent)}")
        console.print(shown(results, shape, asked.connections))


if __name__ == "__main__":
    main()
