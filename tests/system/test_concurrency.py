"""A controller over a real gateway whose engine decodes few requests at once."""

import asyncio

import pytest

from manege.engine.base import EngineInfo
from manege.engine.scripted import ScriptedEngine, hashed_reply
from tests.system.test_controller import controlling, run_config, spec

pytestmark = pytest.mark.anyio


class BatchEngine(ScriptedEngine):
    """A second per answer; answers beyond `batch` wait in its queue."""

    def __init__(self, batch):
        super().__init__(hashed_reply(num_tokens=4, first_id=97, last_id=122), token_delay_s=0.25)
        self.batch, self.num_waiting, self._changed = batch, 0, asyncio.Condition()

    async def generate(self, prompt_ids, sampling):
        self.num_waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self.num_running < self.batch)
        finally:
            self.num_waiting -= 1
        async for chunk in super().generate(prompt_ids, sampling):
            yield chunk
        await self.widen(self.batch)

    async def widen(self, batch):
        """Also wakes those that wait."""
        self.batch = batch
        async with self._changed:
            self._changed.notify_all()

    async def info(self):
        info = await super().info()
        return EngineInfo(
            model=info.model,
            context_limit=info.context_limit,
            version=info.version,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            paused=info.paused,
        )


@pytest.fixture
async def engine():
    made = BatchEngine(2)
    yield made
    await made.close()


async def num_running(client, wanted):
    """Once it is so."""
    async with asyncio.timeout(30):
        while not wanted((await client.state())["rollouts"]["running"]):
            await asyncio.sleep(0.1)


async def test_fewer_attempts_run_while_the_engine_has_a_queue_and_more_when_it_has_room(client, engine, tmp_path):
    await client.put_run("run", run_config("ask_once").model_dump(mode="json"))
    await client.create_rollouts([spec(f"r{number}") for number in range(400)])
    async with controlling(client, tmp_path, slots=8, min_slots=2, lease_s=2):
        await num_running(client, lambda number: number == 8)
        await num_running(client, lambda number: number <= 4)
        await engine.widen(32)
        await num_running(client, lambda number: number == 8)
    assert (await client.state())["rollouts"]["failed"] == 0
