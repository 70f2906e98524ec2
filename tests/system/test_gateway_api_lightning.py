"""Agent Lightning's clients: what its trainer, its controller and its agents send, and the shapes they read.

Its server is the source of the shapes: agentlightning 1.0.2, schemas.py and server/routes.
"""

import asyncio

import httpx
import numpy as np
import openai
import pytest

from manege.engine.server import engine_app
from manege.gateway.server import Server
from manege.store.base import Ending
from manege.types import Outcome, RolloutSpec, Task
from tests.calls import make_call
from tests.conftest import OPERATOR_KEY

pytestmark = pytest.mark.anyio

STATUS_FIELDS = {
    "state",
    "k8s_job_name",
    "last_attempt_id",
    "error_message",
    "version",
    "created_at",
    "updated_at",
}


@pytest.fixture
async def http(gateway):
    headers = {"authorization": f"Bearer {OPERATOR_KEY}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, trust_env=False, timeout=30) as opened:
        yield opened


async def create(http, *names, **fields):
    config = {"timeout_seconds": 60, "local": {"agent_class": "my.agent:Agent", "env_map": {"Q": "input.q"}}}
    items = [
        {"rollout_id": name, "input": {"q": 1, "data_id": f"d-{name}"}, "config": config, **fields} for name in names
    ]
    answer = await http.post("/api/rollouts", json=items)
    assert answer.status_code == 201
    return answer.json()


async def report(http, name, **status):
    return await http.patch(f"/api/rollouts/{name}", json={"status": status})


async def test_created_rollouts_have_its_shape_and_creation_is_idempotent(http):
    (made,) = await create(http, "a", is_train=True, metadata={"batch_idx": 3, "extra": "x"})
    assert set(made) == {"rollout_id", "input", "is_train", "config", "metadata", "status"}
    assert (made["rollout_id"], made["input"], made["is_train"]) == ("a", {"q": 1, "data_id": "d-a"}, True)
    assert made["config"]["local"] == {"agent_class": "my.agent:Agent", "env_map": {"Q": "input.q"}}
    assert made["metadata"] == {"batch_idx": 3, "sample_idx_in_batch": None, "extra": "x"}
    assert (set(made["status"]), made["status"]["state"]) == (STATUS_FIELDS, "queuing")
    assert await create(http, "a", is_train=False) == [made]
    plain = (await http.post("/api/rollouts", json=[{"input": [1, "two"]}])).json()[0]
    assert (plain["input"], len(plain["rollout_id"]), plain["config"]["timeout_seconds"]) == ([1, "two"], 32, 3600)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{}", 422), (b"[{}]", 422), (b'[{"input": 1, "is_train": "perhaps"}]', 422), (b"\xff", 400), (b"[", 400)],
)
async def test_a_wrong_creation_is_refused(http, body, status):
    assert (await http.post("/api/rollouts", content=body)).status_code == status


async def test_its_controller_lists_starts_and_ends_rollouts(http):
    await create(http, "a", "b", "c")
    query = httpx.QueryParams([("state_in", "queuing"), ("state_in", "running"), ("limit", 50)])
    assert [item["rollout_id"] for item in (await http.get("/api/rollouts", params=query)).json()] == ["a", "b", "c"]
    started = (await report(http, "a", state="running", last_attempt_id="0", k8s_job_name="job")).json()["status"]
    assert (started["state"], started["last_attempt_id"], started["k8s_job_name"]) == ("running", "0", "job")
    assert (await report(http, "a", state="succeeded", last_attempt_id="0")).json()["status"]["state"] == "succeeded"
    failed = (await report(http, "b", state="failed", error_message="spawn failed")).json()["status"]
    assert (failed["state"], failed["error_message"]) == ("failed", "spawn failed")
    refused = [("a", "running"), ("a", "failed"), ("c", "succeeded"), ("c", "queuing")]
    assert [(await report(http, name, state=state)).status_code for name, state in refused] == [409] * 4
    assert (await report(http, "c", colour="red")).status_code == 422
    assert (await http.patch("/api/rollouts/c", json={})).json()["status"]["state"] == "queuing"
    listed = (await http.get("/api/rollouts", params={"state_in": "failed"})).json()
    assert [item["rollout_id"] for item in listed] == ["b"]


async def test_cancelled_reads_as_failed(http, client):
    await create(http, "a")
    await client.cancel("a")
    detail = (await http.get("/api/rollouts/a")).json()
    assert detail["rollout"]["status"]["state"] == "failed"
    assert [item["rollout_id"] for item in (await http.get("/api/rollouts?state_in=failed")).json()] == ["a"]
    assert (await http.get("/api/rollouts/terminal?after=0")).json()["items"][0]["state"] == "failed"


async def test_the_terminal_feed_is_paged_by_a_cursor_in_the_order_of_completion(http):
    await create(http, "a", "b", "c")
    for name in ("c", "a", "b"):
        await report(http, name, state="failed")
    first = (await http.get("/api/rollouts/terminal", params={"after": 0, "limit": 2})).json()
    assert first["items"][0] == {"rollout_id": "c", "state": "failed", "data_id": "d-c", "is_train": True}
    rest = (await http.get("/api/rollouts/terminal", params={"after": first["next_after"]})).json()
    assert [item["rollout_id"] for item in first["items"] + rest["items"]] == ["c", "a", "b"]
    assert (rest["next_after"], rest["total_terminal"]) == (3, 3)
    assert (await http.get("/api/rollouts/terminal", params={"after": -1})).json()["next_after"] == 3


async def test_its_agent_calls_the_model_posts_its_reward_and_the_trainer_reads_triplets(http, gateway):
    await create(http, "a")
    base = f"{gateway.url}/proxy/rollout/a/attempt/0/mode/train/openai/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key=OPERATOR_KEY) as agent:
        answered = await agent.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    await report(http, "a", state="running", last_attempt_id="0")
    event = await http.post("/api/rollouts/a/attempt/0/events", json={"event_type": "reward", "data": {"value": 0.5}})
    assert set(event.json()) == {"event_type", "rollout_id", "attempt_id", "timestamp", "data"}
    assert (event.json()["attempt_id"], event.json()["data"]) == ("0", {"value": 0.5})
    await report(http, "a", state="succeeded", last_attempt_id="0")

    payload = (await http.get("/api/rollouts/a")).json()
    assert (payload["rollout"]["status"]["state"], payload["attempts"]) == ("succeeded", ["0"])
    raw = (await http.get("/api/rollouts/a/events", params={"include_routed_experts": False})).json()
    assert [item["event_type"] for item in raw] == ["model_request", "reward"]
    choice = raw[0]["data"]["response"]["choices"][0]
    assert choice["message"]["content"] == answered.choices[0].message.content
    triplets = (await http.get("/api/rollouts/a/events", params={"format": "triplet"})).json()
    data = triplets[0]["data"]
    assert (data["status"], data["http_status"], data["server"]) == ("ok", 200, {"model": "tiny", "version": 0})
    assert data["response_token_ids"] == choice["token_ids"]
    assert len(data["response_log_probs"]) == len(data["response_token_ids"]) > 0
    assert len(data["prompt_token_ids"]) == answered.usage.prompt_tokens
    assert triplets[1]["data"] == {"value": 0.5}
    assert (await http.delete("/api/rollouts/a")).status_code == 204
    assert (await http.delete("/api/rollouts/a")).status_code == 204
    assert (await http.get("/api/rollouts/a")).status_code == 404


async def test_triplets_keep_the_last_of_calls_with_the_same_prompt(http, store, client):
    await create(http, "r")
    await report(http, "r", state="running")
    for name, prompt, response in [("c1", [1, 2], [3]), ("c2", [1, 2], [4]), ("c3", [1], [5, 6])]:
        await store.add_call(make_call(name, prompt, response))
    params = {"format": "triplet", "event_type": "model_request"}
    found = [item["data"] for item in (await http.get("/api/rollouts/r/events", params=params)).json()]
    assert [(data["prompt_token_ids"], data["response_token_ids"]) for data in found] == [([1, 2], [4]), ([1], [5, 6])]
    assert np.allclose(found[1]["response_log_probs"], [-0.5, -0.5])


async def test_a_scorers_verdict_reads_as_a_reward_event_and_the_trainers_hook_may_add_one(http, client):
    await client.create_rollouts([RolloutSpec(id="s", run="run", task=Task(id="t", input={}))])
    await client.claim(controller="c", limit=1, lease_s=30)
    await client.finish("s", 0, Ending(outcome=Outcome.OK, reward=0.75))
    params = {"format": "triplet", "event_type": "reward"}
    assert [event["data"]["value"] for event in (await http.get("/api/rollouts/s/events", params=params)).json()] == [
        0.75
    ]
    body = {"event_type": "reward", "data": {"value": -1.0, "source": "fallback"}}
    assert (await http.post("/api/rollouts/s/attempt/0/events", json=body)).status_code == 200
    last = (await http.get("/api/rollouts/s/events", params=params)).json()[-1]
    assert last["data"] == {"value": -1.0, "source": "fallback"}


async def test_a_failed_rollout_without_a_reward_shows_none(http):
    await create(http, "a")
    await report(http, "a", state="failed")
    assert (await http.get("/api/rollouts/a/events")).json() == []


async def test_its_trainer_pauses_at_once_watches_the_calls_in_flight_and_resumes(http, gateway):
    async with gateway.services.gate.enter():
        paused = (await http.post("/proxy/pause", json={"reason": "update"})).json()
        assert (paused["paused"], paused["inflight"], paused["reason"]) == (True, 1, "update")
        assert isinstance(paused["retry_after_seconds"], int)
    while (await http.get("/proxy/state")).json()["inflight"]:
        await asyncio.sleep(0.01)
    resumed = (await http.post("/proxy/resume")).json()
    assert (resumed["paused"], resumed["reason"]) == (False, None)


async def test_engines_are_registered_once_per_endpoint(http, engine):
    async with Server(engine_app(engine, encode=list, decode=str)) as one:
        entries = [{"model": "m", "endpoint": f"{one.url}/v1"} for _ in range(2)]
        made = await http.post("/api/models", json=entries)
        known = {**entries[0], "mode": "messages", "wire": "vllm"}
        assert (made.status_code, made.json()[0]) == (201, {**known, "version": 0})
        await http.post("/api/models", json=[{**entries[0], "version": 4}])
        assert (await http.get("/api/models")).json() == [{**known, "version": 4}]
        assert (await http.post("/api/models", json={"model": "m"})).status_code == 422
        assert (await http.delete("/api/models")).json() == {"status": "ok"}
        assert (await http.get("/api/models")).json() == []
