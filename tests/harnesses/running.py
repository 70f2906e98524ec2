"""Run a harness on the coding task: real gateway, real controller and sandbox, the scripted engine as its model."""

import asyncio
import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from manege.client import Client
from manege.config import ControllerConfig, RunConfig, SandboxConfig
from manege.controller.loop import Controller
from manege.engine.scripted import ScriptedEngine
from manege.gateway.app import create_app
from manege.gateway.server import GatewayServer
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from manege.sandbox.probe import probe
from manege.store.sql import SqlStore
from manege.types import Call, Rollout, RolloutSpec, Task
from tests.conftest import OPERATOR_KEY
from tests.harnesses.policy import CONTEXT_LIMIT, MODEL, TASK


@dataclass(frozen=True, kw_only=True)
class Ran:
    rollout: Rollout
    calls: list[Call]
    left: list[int]
    """Processes that still know the run's folder."""
    seconds: float


def scripted(reply):
    decode = open_folder(MODEL).tokenizer.decode
    return ScriptedEngine(reply, decode=lambda ids: decode(list(ids)), context_limit=CONTEXT_LIMIT, chunk_size=8)


async def run_harness(name, engine, folder, *, context_limit=CONTEXT_LIMIT, sampling=None, **agent):
    """One rollout, to its end. Nobody can know the words of its task without having looked at the file."""
    words = [f"secret-{''.join(secrets.choice('abcdefgh') for _ in range(12))}" for _ in range(3)]
    config = RunConfig.model_validate(
        {
            "name": "run",
            "tasks": {"train": "tasks.jsonl"},
            "agent": {
                "harness": name,
                "setup": "tests.harnesses.programs:prepare",
                "limits": {"run_s": 150},
                **agent,
            },
            "scorer": {"run": "tests.harnesses.programs:score"},
            "sampling": sampling or {},
        }
    )
    task = Task(id="coding", input={"task": TASK}, hidden={"words": words})
    began_s = time.monotonic()
    async with serving(engine, folder, context_limit) as client:
        await client.put_run("run", config.to_json())
        async with controlling(client, folder):
            await client.create_rollouts([RolloutSpec(id="r1", run="run", task=task, max_attempts=1)])
            while not (page := await client.terminal(run="run", after=0, wait_s=30)).rollouts:
                pass
            (rollout,) = page.rollouts
            left = processes_of(folder)
        calls = (await client.calls(["r1"])).get("r1", [])
    return Ran(rollout=rollout, calls=calls, left=left, seconds=time.monotonic() - began_s)


@contextlib.asynccontextmanager
async def serving(engine, folder, context_limit):
    store = await SqlStore.open(folder / "store.db")
    try:
        app = create_app(
            store=store,
            engine=engine,
            renderer=renderer_for(open_folder(MODEL)),
            operator_key=OPERATOR_KEY,
            model_name=MODEL,
            context_limit=context_limit,
        )
        async with GatewayServer(app) as server, Client(server.url, OPERATOR_KEY) as client:
            yield client
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def controlling(client, folder):
    sandbox = SandboxConfig(unsafe=not probe().isolates)
    controller = Controller(client, name="test", folder=folder, config=ControllerConfig(slots=1), sandbox=sandbox)
    task = asyncio.create_task(controller.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def processes_of(folder):
    """Processes whose environment or command line names the folder of workspaces."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if str(folder / "workspaces").encode() in text and int(pid) != os.getpid():
            found.append(int(pid))
    return found
