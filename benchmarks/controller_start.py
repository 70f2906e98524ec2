"""How fast agents start: CPU per warm start, delay from a rollout's creation to its agent, rollouts per second.

    python benchmarks/controller_start.py [--rollouts 64]

One process holds gateway (scripted engine), store and controller, as in `manege train`. The agent imports the official
`openai` client and makes one client, as every agent does. Prints JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from manege.client import Client
from manege.config import ControllerConfig, RunConfig, SandboxConfig
from manege.controller.loop import Controller
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.gateway.app import create_app
from manege.gateway.server import GatewayServer
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from manege.sandbox.probe import probe
from manege.store.sql import SqlStore
from manege.types import RolloutSpec, Task

AGENT = """
import time
from openai import OpenAI

def main():
    print(time.time())
    OpenAI().chat.completions
"""
SCORER = """
def score(task, attempt):
    return float(attempt.stdout)
"""
SLOTS = 16


async def measure(folder, num_rollouts):
    (folder / "bench_agent.py").write_text(AGENT)
    (folder / "bench_scorer.py").write_text(SCORER)
    sys.path.append(str(folder))
    config = RunConfig.model_validate(
        {
            "name": "bench",
            "tasks": {"train": "none"},
            "agent": {"run": "bench_agent:main"},
            "scorer": {"run": "bench_scorer:score"},
        }
    )
    store = await SqlStore.open(folder / "store.db")
    app = create_app(
        store=store,
        engine=ScriptedEngine(hashed_reply(num_tokens=4, first_id=97, last_id=122)),
        renderer=renderer_for(open_folder(str(Path("tests/tiny/model")))),
        operator_key="mo-bench",
        model_name="tiny",
        context_limit=2048,
    )
    async with GatewayServer(app) as server, Client(server.url, "mo-bench") as client:
        await client.put_run("bench", config.model_dump(mode="json"))
        sandbox = SandboxConfig(unsafe=not probe().isolates)
        controller = Controller(
            client, name="bench", folder=folder, config=ControllerConfig(slots=SLOTS), sandbox=sandbox
        )
        await controller.prepare(config)
        running = asyncio.create_task(controller.run())
        first = await settle(client, ["warm"])
        alone = [(await settle(client, [f"alone{index}"]))[0] for index in range(10)]
        began_s = time.perf_counter()
        crowd = await settle(client, [f"crowd{index}" for index in range(num_rollouts)])
        seconds = time.perf_counter() - began_s
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    await store.close()
    delays_ms = [1000 * (rollout.reward - rollout.created_s) for rollout in alone]
    return {
        "first_ms": 1000 * (first[0].reward - first[0].created_s),
        "created_to_agent_ms": {"median": statistics.median(delays_ms), "max": max(delays_ms)},
        "cpu_per_agent_ms": 1000 * statistics.mean(rollout.evidence["cpu_s"] for rollout in crowd),
        "rollouts_per_s": num_rollouts / seconds,
        "load": os.getloadavg()[0],
    }


async def settle(client, names):
    cursor = (await client.terminal(run="bench", after=0, limit=1000)).cursor
    task = Task(id="t", input={})
    await client.create_rollouts([RolloutSpec(id=name, run="bench", task=task) for name in names])
    ended = []
    while len(ended) < len(names):
        page = await client.terminal(run="bench", after=cursor, wait_s=30)
        ended += page.rollouts
        cursor = page.cursor
    return ended


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(asyncio.run(measure(Path(name), arguments.rollouts)), indent=2))
