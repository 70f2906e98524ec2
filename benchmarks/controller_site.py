"""Our gateway (scripted engine), store and controller in one process, as in `manege train`, for the benchmarks."""

import asyncio
import contextlib
import sys
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
from manege.types import Outcome, RolloutSpec, Task

KEY = "mo-bench"


@contextlib.asynccontextmanager
async def site(folder, *, agent, scorer, slots):
    """A client of it. `agent` and `scorer`: source with the functions `main` and `score`."""
    (folder / "bench_agent.py").write_text(agent)
    (folder / "bench_scorer.py").write_text(scorer)
    sys.path.append(str(folder))
    config = RunConfig.model_validate(
        {
            "name": "bench",
            "tasks": {"train": str(folder / "none")},
            "agent": {"run": "bench_agent:main"},
            "scorer": {"run": "bench_scorer:score"},
        }
    )
    store = await SqlStore.open(folder / "store.db")
    app = create_app(
        store=store,
        engine=ScriptedEngine(hashed_reply(num_tokens=4, first_id=97, last_id=122)),
        renderer=renderer_for(open_folder(str(Path("tests/tiny/model")))),
        operator_key=KEY,
        model_name="tiny",
        context_limit=2048,
    )
    async with GatewayServer(app) as server, Client(server.url, KEY) as client:
        await client.put_run("bench", config.model_dump(mode="json"))
        sandbox = SandboxConfig(unsafe=not probe().isolates)
        controller = Controller(
            client, name="bench", folder=folder, config=ControllerConfig(slots=slots), sandbox=sandbox
        )
        await controller.prepare(config)
        running = asyncio.create_task(controller.run())
        try:
            yield client
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    await store.close()


async def settle(client, names, *, scored=True):
    """The rollouts of these names, made and ended; scored, or left to the agent to judge."""
    cursor = (await client.terminal(run="bench", after=0, limit=1000)).cursor
    task = Task(id="t", input={})
    reward_from = "scorer" if scored else "agent"
    specs = [RolloutSpec(id=name, run="bench", task=task, reward_from=reward_from) for name in names]
    await client.create_rollouts(specs)
    ended = []
    while len(ended) < len(names):
        page = await client.terminal(run="bench", after=cursor, wait_s=30)
        ended += page.rollouts
        cursor = page.cursor
    failed = [each.message for each in ended if each.outcome is not Outcome.OK or (scored and each.reward is None)]
    if failed:
        raise SystemExit(f"{len(failed)} rollouts failed: {failed[0]}")
    return ended
