"""A run that is stuck is told from one that is slow: pure ages and the rule with a clock, then over a real gateway."""

import asyncio
import logging
import time

import openai
import pytest

from manege.client import Client
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.gateway.presence import BEAT_S
from manege.gateway.server import GatewayServer
from manege.gateway.watchdog import LONG_PAUSE_S, STUCK_S, Watchdog, ages, quiet_s
from manege.types import RolloutSpec, Task
from tests.conftest import OPERATOR_KEY, gateway_app


@pytest.mark.parametrize(
    ("oldest", "progress_s", "expected_s"),
    [
        ({}, 0.0, 0.0),
        ({"running": 10.0}, 0.0, 90.0),
        ({"running": 10.0}, 40.0, 60.0),
        ({"running": 10.0, "queued": 95.0}, 40.0, 60.0),
        # What has just come has not been waiting, however long nothing happened before it.
        ({"queued": 99.0}, 0.0, 1.0),
        # Clocks of gateways differ.
        ({"queued": 101.0}, 0.0, 0.0),
    ],
    ids=["nothing waits", "never moved", "moved since", "the oldest counts", "just come", "from the future"],
)
def test_it_is_quiet_since_the_last_progress_or_since_the_oldest_thing_came(oldest, progress_s, expected_s):
    assert quiet_s(oldest, progress_s, now_s=100.0) == expected_s


def test_ages_are_told_from_the_oldest_on():
    told = ages({"queued": 99.0, "running": 10.0, "pause": 100.2}, now_s=100.0)
    assert list(told.items()) == [("running", 90.0), ("queued", 1.0), ("pause", 0.0)]


def test_stuck_is_said_once_and_so_is_its_end(caplog):
    caplog.set_level(logging.INFO, "manege.gateway")
    watchdog = Watchdog()
    for now_s in range(0, 200, 2):
        # Nothing moves but at 150 s.
        watchdog.look({"running": 0.0, "call_in_flight": 3.0}, 150.0 if now_s >= 150 else 5.0, now_s)
    warning, end = caplog.records
    assert (warning.levelname, end.levelname) == ("WARNING", "INFO")
    assert warning.message == "stuck: nothing has moved for_s=61 running=66s call_in_flight=63s"
    assert end.message == "not stuck any more"


def test_a_slow_run_is_not_stuck(caplog):
    """One token a minute, less a second; then one rollout that ends at a time."""
    watchdog = Watchdog()
    for now_s in range(0, 3600, 2):
        progress_s = now_s - now_s % (STUCK_S - 1)
        watchdog.look({"queued": 0.0, "running": 0.0, "call_in_flight": 0.0}, progress_s, now_s)
    assert caplog.records == []


class Clock:
    """Real time, and what a test adds to it."""

    def __init__(self):
        self.added_s = 0.0

    def __call__(self):
        return time.time() + self.added_s


@pytest.mark.anyio
async def test_a_gateway_says_what_waits_and_warns_when_nothing_moves(store, caplog):
    caplog.set_level(logging.INFO, "manege.gateway")
    clock = Clock()
    engine = ScriptedEngine(hashed_reply(num_tokens=4, first_id=97, last_id=122))
    app = gateway_app(store, engine, clock=clock)

    async def until(condition):
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.02)

    def told(text):
        return lambda: any(text in record.message for record in caplog.records)

    async with GatewayServer(app) as server, Client(server.url, OPERATOR_KEY) as client:
        assert (await client.state())["oldest"] == {}
        await client.create_rollouts([RolloutSpec(id=name, run="run", task=Task(id="t", input={})) for name in "rq"])
        (claim,) = await client.claim(controller="c", limit=1, lease_s=60)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=claim.agent_key, max_retries=0) as agent:
            asked = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
            await engine.pause()
            asking = asyncio.create_task(agent.chat.completions.create(**asked))
            await until(lambda: engine.num_running)
            clock.added_s += STUCK_S - BEAT_S - 2
            oldest = (await client.state())["oldest"]
            assert set(oldest) == {"queued", "running", "call_in_flight", "engine"}
            assert all(age_s >= STUCK_S - BEAT_S - 2 for age_s in oldest.values())
            await asyncio.sleep(BEAT_S + 0.5)
            assert not told("stuck")()
            clock.added_s += BEAT_S + 2
            await until(told("stuck: nothing has moved"))
            (sign,) = await store.gateways()
            assert (sign.state["in_flight"], sign.state["held"], sign.state["pause"]) == (1, 0, None)
            assert sign.state["oldest"]["engine"] >= STUCK_S - BEAT_S
            await engine.resume()
            await asking
            await until(told("not stuck any more"))
            # Held at a pause.
            await client.pause(drain_s=1)
            asking = asyncio.create_task(agent.chat.completions.create(**asked))
            await until(lambda: server.services.gate.num_held)
            clock.added_s += 5
            oldest = (await client.state())["oldest"]
            assert (set(oldest) - {"raw_call"}, 5 <= oldest["pause"] < 20, 5 <= oldest["call_held"] < 20) == (
                {"queued", "running", "pause", "call_held"},
                True,
                True,
            )
            await client.resume()
            await asking
    assert await store.gateways() == []
    await engine.close()


def test_a_step_of_minutes_is_not_stuck_and_one_of_an_hour_is(caplog):
    caplog.set_level("WARNING")
    watchdog = Watchdog()
    for now_s in range(0, 3600, 60):
        watchdog.look({"pause": 0.0, "call_held": 5.0}, 0.0, float(now_s))
        assert ("stuck" in caplog.text) == (now_s >= LONG_PAUSE_S)
