"""A gateway killed with SIGKILL in the middle of writes: whatever it acknowledged is there after the restart."""

import asyncio
import os
import signal
import subprocess
import sys

import httpx
import pytest

from manege.client import Client
from manege.engine.base import Weights
from manege.errors import ManegeError
from manege.store.base import Ending
from manege.types import Outcome, RolloutSpec, RolloutState, Task
from tests.conftest import OPERATOR_KEY

pytestmark = pytest.mark.anyio

SERVE = """
import asyncio, sys
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.gateway.app import create_app
from manege.gateway.server import GatewayServer
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from manege.store.sql import SqlStore

async def main(path, model, key):
    store = await SqlStore.open(path)
    engine = ScriptedEngine(hashed_reply(num_tokens=4, first_id=97, last_id=122))
    renderer = renderer_for(open_folder(model))
    app = create_app(
        store=store, engine=engine, renderer=renderer, operator_key=key, model_name="tiny", context_limit=2048
    )
    async with GatewayServer(app) as server:
        print(server.url, flush=True)
        await server.wait()

asyncio.run(main(*sys.argv[1:]))
"""


class Gateway:
    """A gateway in a process of its own."""

    def __init__(self, path):
        model = os.path.join(os.path.dirname(__file__), "..", "tiny", "model")
        argv = [sys.executable, "-c", SERVE, str(path), model, OPERATOR_KEY]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


class Acknowledged:
    """What the gateway said it had kept."""

    def __init__(self):
        self.created, self.ended, self.events, self.calls, self.version = set(), set(), set(), set(), 0
        self.seen, self.cursor = [], 0


async def work(url, worker, known):
    """One controller with its agents: create, claim, call, log, finish; until the gateway is gone."""
    async with Client(url, OPERATOR_KEY) as client, httpx.AsyncClient(base_url=url, trust_env=False) as agent:
        for number in range(10**6):
            name = f"w{worker}-{number}"
            await client.create_rollouts([RolloutSpec(id=name, run="run", task=Task(id="t", input={"x": "y" * 500}))])
            known.created.add(name)
            for claim in await client.claim(controller=f"c{worker}", limit=1, lease_s=600):
                taken = claim.rollout.spec.id
                body = {"model": "m", "messages": [{"role": "user", "content": taken}]}
                headers = {"authorization": f"Bearer {claim.agent_key}"}
                answer = await agent.post("/v1/chat/completions", json=body, headers=headers)
                known.calls.add((taken, answer.json()["choices"][0]["message"]["content"]))
                await client.add_event(taken, 0, "note", {"from": taken})
                known.events.add(taken)
                await client.finish(taken, 0, Ending(outcome=Outcome.OK, reward=0.5))
                known.ended.add(taken)


async def follow(url, known):
    """One reader of the terminal feed: it goes on from its cursor, wherever the gateway is now."""
    async with Client(url, OPERATOR_KEY) as client:
        while True:
            page = await client.terminal(run="run", after=known.cursor, limit=3, wait_s=5)
            known.seen += [(rollout.spec.id, rollout.completion) for rollout in page.rollouts]
            known.cursor = page.cursor


async def publish(url, known):
    async with Client(url, OPERATOR_KEY) as client:
        while True:
            await client.pause(drain_s=0)
            known.version = await client.publish(Weights(kind="shared"))
            await client.resume()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("num_ended", [1, 40])
async def test_every_acknowledged_write_survives_kill_9(tmp_path, num_ended):
    known, gateway = Acknowledged(), Gateway(tmp_path / "store.db")
    workers = [asyncio.create_task(work(gateway.url, worker, known)) for worker in range(6)]
    workers += [asyncio.create_task(task(gateway.url, known)) for task in (publish, follow)]
    while len(known.ended) < num_ended or not known.version:
        await asyncio.sleep(0.01)
    gateway.kill()
    for worker in workers:
        worker.cancel()
    results = await asyncio.gather(*workers, return_exceptions=True)
    assert all(isinstance(r, (asyncio.CancelledError, ManegeError, httpx.TransportError)) for r in results), results

    gateway = Gateway(tmp_path / "store.db")
    try:
        async with Client(gateway.url, OPERATOR_KEY) as client, httpx.AsyncClient(trust_env=False) as http:
            for name in known.created:
                assert (await client.get_rollout(name)).spec.task.input == {"x": "y" * 500}
            page = await client.terminal(run="run", after=0, limit=1000)
            assert known.ended <= {rollout.spec.id for rollout in page.rollouts}
            reading = asyncio.create_task(follow(gateway.url, known))
            async with asyncio.timeout(10):
                while known.cursor < len(page.rollouts):
                    await asyncio.sleep(0.01)
            reading.cancel()
            assert known.seen == [(rollout.spec.id, rollout.completion) for rollout in page.rollouts]
            assert all(r.state is RolloutState.SUCCEEDED and r.reward == 0.5 for r in page.rollouts)
            assert [rollout.completion for rollout in page.rollouts] == list(range(1, len(page.rollouts) + 1))
            calls = await client.calls([name for name, _ in known.calls])
            assert known.calls <= {(name, call.reply["content"]) for name, found in calls.items() for call in found}
            assert (await client.state())["version"] >= known.version
            for name in known.events:
                headers = {"authorization": f"Bearer {OPERATOR_KEY}"}
                answer = await http.get(f"{gateway.url}/api/rollouts/{name}/events?event_type=note", headers=headers)
                assert [event["data"] for event in answer.json()] == [{"from": name}]
    finally:
        gateway.kill()
