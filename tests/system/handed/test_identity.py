"""An agent is known by its socket, whatever it sends there."""

import anthropic
import httpx2
import openai
import pytest

from manege.store.base import Ending
from manege.types import Outcome
from tests.conftest import OPERATOR_KEY
from tests.system.agents.asking import ask, user
from tests.system.handed.agents import WAYS, chat, count, openai_at, sandbox

pytestmark = pytest.mark.anyio


async def test_calls_are_of_the_sockets_rollout_whatever_key_is_sent(url, http, claims, store):
    keys = ["none", OPERATOR_KEY, claims[1].agent_key]
    for key in keys:
        async with openai_at(url, key) as client:
            assert (await ask(client, [user("hi")])).choices[0].message.content
        sent = httpx2.AsyncClient(trust_env=False)
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, http_client=sent) as client:
            assert (await client.messages.create(model="m", max_tokens=9, messages=[user("hi")])).content
        for options in (
            {"headers": {"x-goog-api-key": key}},
            {"params": {"key": key}},
            {"headers": [("authorization", f"Bearer {key}"), ("Authorization", f"Bearer {key}")]},
        ):
            assert (await chat(http, **options)).status_code == 200
    assert (await chat(http)).status_code == 200
    assert (await count(store, "r1"), await count(store, "r2")) == (5 * len(keys) + 1, 0)
    assert not any("key" in name or name == "authorization" for call in (await store.calls(["r1"]))["r1"]
                   for name in call.headers)  # fmt: skip


@pytest.mark.parametrize("key", ["none", OPERATOR_KEY])
async def test_nothing_is_open_on_it_but_the_attempts_own(url, http, claims, key, store):
    http.headers["authorization"] = f"Bearer {key}"
    for method, path in (
        ("GET", "/proxy/state"),
        ("POST", "/proxy/pause"),
        ("GET", "/metrics"),
        ("POST", "/api/leases"),
        ("GET", "/api/rollouts/r1"),
        ("GET", "/api/rollouts/r1/events"),
        ("POST", "/api/rollouts/r1/cancel"),
        ("POST", "/api/rollouts/r2/attempt/0/events"),
        ("POST", "/api/rollouts/r1/attempt/1/events"),
    ):
        answer = await http.request(method, path, params={"key": key}, json={} if method == "POST" else None)
        assert answer.status_code == 403, (path, answer.text)
    other = "/proxy/rollout/r2/attempt/0/mode/train/openai/v1/chat/completions"
    assert (await chat(http, other)).status_code == 403
    assert (await chat(http, other.replace("r2", "r1"))).status_code == 200
    event = {"event_type": "note", "data": {"by": "agent"}}
    assert (await http.post("/api/rollouts/r1/attempt/0/events", json=event)).status_code == 200
    reward = {"event_type": "reward", "data": {"value": 1.0}}
    assert (await http.post("/api/rollouts/r1/attempt/0/events", json=reward)).status_code == 403
    assert [event.data for event in await store.events("r1", event_type="note")] == [{"by": "agent"}]
    assert (await count(store, "r1"), await count(store, "r2")) == (1, 0)


async def test_an_attempt_that_was_cancelled_is_answered_409_at_once(url, http, client, store):
    assert (await chat(http)).status_code == 200
    await client.cancel("r1")
    assert (await chat(http)).status_code == 409
    async with openai_at(url) as agent:
        with pytest.raises(openai.ConflictError):
            await ask(agent, [user("hi")])
    assert len(await store.events("r1", event_type="late.call")) == 2


async def test_an_attempt_that_was_superseded_is_answered_409_also_when_handed_over_late(http, client, claims, store):
    await client.finish("r1", 0, Ending(outcome=Outcome.INFRA_ERROR))
    (again,) = await client.claim(controller="c", limit=1, lease_s=60)
    assert (await chat(http)).status_code == 409
    for way in WAYS:
        async with sandbox(client, claims[0], way) as late, sandbox(client, again, way) as current:
            async with openai_at(late) as agent:
                with pytest.raises(openai.ConflictError):
                    await ask(agent, [user("hi")])
            async with openai_at(current) as agent:
                await ask(agent, [user("hi")])
