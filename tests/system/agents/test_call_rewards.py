"""Rewards of single calls, posted by an agent that knows its calls by what its client showed it."""

import anthropic
import httpx2
import pytest
from google import genai

from manege.store.base import Ending
from manege.types import Outcome
from tests.system.agents.asking import calls_of, user

pytestmark = pytest.mark.anyio


@pytest.fixture
async def key(gateway, rollout):
    """Of a rollout that may judge itself."""
    return gateway.services.auth.agent_key(await rollout(reward_from="agent"), 0)


@pytest.fixture
async def openai(sdk, key):
    return sdk("r1", key=key)


def post(http, key, data, *, attempt=0):
    body = {"event_type": "call_reward", "data": data}
    headers = {"authorization": f"Bearer {key}"}
    return http.post(f"/api/rollouts/r1/attempt/{attempt}/events", json=body, headers=headers)


async def earned(store):
    events = await store.events("r1", event_type="call_reward")
    return {event.data["call"]: event.data["value"] for event in events}


async def test_every_protocol_shows_an_id_that_can_be_rewarded(gateway, http, key, openai, store):
    gemini = genai.Client(api_key=key, http_options={"base_url": gateway.url})
    claude = anthropic.AsyncAnthropic(
        base_url=gateway.url, api_key=key, http_client=httpx2.AsyncClient(trust_env=False)
    )
    async with claude:
        shown = [
            (await openai.chat.completions.create(model="m", messages=[user("say one")])).id,
            (await openai.completions.create(model="m", prompt="say two")).id,
            (await openai.responses.create(model="m", input="say three")).id,
            (await claude.messages.create(model="m", max_tokens=9, messages=[user("say four")])).id,
            (await gemini.aio.models.generate_content(model="m", contents="say five")).response_id,
        ]
    calls = await calls_of(store)
    assert shown == [
        f"{prefix}{call.id}" for prefix, call in zip(["chatcmpl-", "cmpl-", "resp_", "msg_", ""], calls, strict=True)
    ]
    for value, call_id in enumerate([*shown, calls[0].id]):  # the last without what the protocol puts before it
        answer = await post(http, key, {"call": call_id, "value": value})
        assert answer.status_code == 200, answer.text
    assert await earned(store) == {call.id: value or 5 for value, call in enumerate(calls)}


@pytest.mark.parametrize("value", ["1", True, None, [1.0]])
async def test_what_is_no_number_is_no_reward(http, key, openai, value):
    call = await openai.chat.completions.create(model="m", messages=[user("say one")])
    answer = await post(http, key, {"call": call.id, "value": value})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unprocessable")
    raw = b'{"event_type": "call_reward", "data": {"call": "%s", "value": NaN}}' % call.id.encode()
    headers = {"authorization": f"Bearer {key}"}
    assert (await http.post("/api/rollouts/r1/attempt/0/events", content=raw, headers=headers)).status_code == 400


async def test_only_calls_of_the_attempt_can_be_rewarded(http, key, openai, gateway, store):
    call = await openai.chat.completions.create(model="m", messages=[user("say one")])
    for unknown in ("nobody", "chatcmpl-", ""):
        answer = await post(http, key, {"call": unknown, "value": 1.0})
        assert answer.status_code == 422, unknown
    await store.finish("r1", 0, Ending(outcome=Outcome.INFRA_ERROR))
    await store.claim(controller="c", limit=1, lease_s=30)
    answer = await post(http, gateway.services.auth.agent_key("r1", 1), {"call": call.id, "value": 1.0}, attempt=1)
    assert answer.status_code == 422
    assert f"attempt 1 of rollout r1 has no call '{call.id.removeprefix('chatcmpl-')}'" in answer.text


async def test_a_reward_sent_again_counts_once(http, key, openai, store):
    call = await openai.chat.completions.create(model="m", messages=[user("say one")])
    for value in (1.0, 1.0, 0.5):
        assert (await post(http, key, {"call": call.id, "value": value})).status_code == 200
    assert list((await earned(store)).values()) == [0.5]
