"""Who may do what: the operator's key, agents' keys, dead keys, and where a key may stand."""

import os
import re
import stat

import httpx
import pytest

from manege.gateway.auth import operator_key
from manege.store.base import Ending
from manege.types import Outcome, RolloutSpec, Task
from tests.conftest import OPERATOR_KEY

pytestmark = pytest.mark.anyio

MODELS = "/proxy/rollout/{0}/attempt/{1}/mode/{2}/openai/v1/models"
EVENTS = "/api/rollouts/{0}/attempt/{1}/events"


@pytest.fixture
async def http(gateway):
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30) as opened:
        yield opened


@pytest.fixture
async def keys(client):
    """Keys of the first attempt of three rollouts: train `a`, validation `v`, self-judging `own`."""
    asked = [{"id": "a"}, {"id": "v", "is_train": False}, {"id": "own", "reward_from": "agent"}]
    await client.create_rollouts([RolloutSpec(run="run", task=Task(id="t", input={}), **spec) for spec in asked])
    claims = await client.claim(controller="c", limit=3, lease_s=30)
    return {claim.rollout.spec.id: claim.agent_key for claim in claims}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def post_event(http, key, rollout_id, attempt=0, event_type="note", data=None):
    body = {"event_type": event_type, "data": data or {}}
    return http.post(EVENTS.format(rollout_id, attempt), json=body, headers=bearer(key))


OPERATOR_ROUTES = [
    ("GET", "/api/rollouts"),
    ("POST", "/api/rollouts"),
    ("POST", "/api/rollouts/batch"),
    ("GET", "/api/rollouts/terminal"),
    ("GET", "/api/rollouts/a"),
    ("PATCH", "/api/rollouts/a"),
    ("DELETE", "/api/rollouts/a"),
    ("POST", "/api/rollouts/a/cancel"),
    ("POST", "/api/rollouts/a/attempt/0/finish"),
    ("POST", "/api/rollouts/a/attempt/0/rescore"),
    ("GET", "/api/rollouts/a/events"),
    ("POST", "/api/calls"),
    ("POST", "/api/leases"),
    ("POST", "/api/leases/held"),
    ("POST", "/api/leases/renew"),
    ("PUT", "/api/runs/run"),
    ("GET", "/api/runs/run"),
    ("POST", "/api/models"),
    ("GET", "/api/models"),
    ("DELETE", "/api/models"),
    ("POST", "/proxy/pause"),
    ("POST", "/proxy/resume"),
    ("POST", "/proxy/weights"),
    ("GET", "/proxy/state"),
    ("GET", "/metrics"),
]


async def test_operator_routes_refuse_agents_strangers_and_the_keyless(http, keys):
    names = {"rollout_id": "a", "attempt": "0", "run_id": "run"}
    described = (await http.get("/openapi.json")).json()["paths"]
    for_operators = {
        (method.upper(), re.sub(r"{(\w+)}", lambda found: names[found[1]], path))
        for path, operations in described.items()
        for method, operation in operations.items()
        if operation.get("x-key") == "operator"
    }
    assert for_operators == set(OPERATOR_ROUTES)
    unknown = (401, "invalid_api_key")
    tries = [(bearer(keys["a"]), (403, "forbidden")), (bearer("mo-wrong"), unknown), ({"x-api-key": ""}, unknown)]
    for method, path in OPERATOR_ROUTES:
        for headers, refused in [*tries, ({}, unknown)]:
            answer = await http.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == refused, (method, path)
    assert (await http.get("/api/rollouts/a", headers=bearer(OPERATOR_KEY))).status_code == 200


async def test_a_key_may_stand_in_any_of_the_usual_places(http, keys):
    places = [bearer(keys["a"]), {"x-api-key": keys["a"]}, {"x-goog-api-key": keys["a"]}]
    answers = [await http.get("/v1/models", headers=headers) for headers in places]
    answers.append(await http.get("/v1/models", params={"key": keys["a"]}))
    answers.append(await http.get("/v1/models", headers={"Authorization": f"bearer {keys['a']}", "X-Api-Key": "none"}))
    assert [answer.status_code for answer in answers] == [200] * 5


@pytest.mark.parametrize(
    ("key", "path", "status"),
    [
        ("a", MODELS.format("a", 0, "train"), 200),
        ("v", MODELS.format("v", 0, "val"), 200),
        ("a", MODELS.format("a", 0, "val"), 403),
        ("v", MODELS.format("v", 0, "train"), 403),
        ("a", MODELS.format("v", 0, "val"), 403),
        ("a", MODELS.format("a", 1, "train"), 403),
        ("operator", MODELS.format("a", 0, "train"), 200),
        ("operator", MODELS.format("a", 1, "train"), 409),
        ("operator", MODELS.format("none", 0, "train"), 404),
        ("operator", MODELS.format("a", "x", "train"), 404),
        ("operator", MODELS.format("a", "9" * 25, "train"), 404),
        ("operator", MODELS.format("a", "9" * 5000, "train"), 404),
        ("operator", "/v1/models", 403),
        ("forged", "/v1/models", 401),
        ("foreign", "/v1/models", 401),
    ],
)
async def test_a_key_is_good_for_its_own_attempt_and_mode(http, keys, key, path, status):
    own = keys["a"]
    given = keys | {"operator": OPERATOR_KEY, "forged": own[:-1] + "b", "foreign": own.replace("mk-0-", "mk-1-")}
    assert (await http.get(path, headers=bearer(given[key]))).status_code == status


async def test_agents_post_events_but_rewards_only_where_they_judge_themselves(http, keys, client):
    assert (await post_event(http, keys["a"], "a", data={"x": 1})).json()["data"] == {"x": 1}
    given = keys | {"operator": OPERATOR_KEY}
    table = [
        ("a", "reward", 403),
        ("own", "reward", 200),
        ("a", "call_reward", 403),
        ("a", "model_request", 403),
        ("operator", "model_request", 403),
        ("own", "late.call", 403),
        ("own", "hack.file", 403),
        ("own", "call.error", 403),
    ]
    for name, event_type, status in table:
        named = "a" if name == "operator" else name
        assert (await post_event(http, given[name], named, 0, event_type, {"value": 0.5})).status_code == status
    assert (await post_event(http, keys["a"], "own")).status_code == 403
    assert (await post_event(http, keys["a"], "a", event_type="")).status_code == 422
    assert (await http.post(EVENTS.format("a", 0), content=b"[]", headers=bearer(keys["a"]))).status_code == 400
    large = await post_event(http, keys["a"], "a", data={"x": "y" * 2_000_000})
    assert (large.status_code, "larger than" in large.text) == (413, True)
    ended = await client.finish("own", 0, Ending(outcome=Outcome.OK))
    assert ended.reward == 0.5


async def test_a_key_is_dead_once_its_attempt_is_over_and_what_comes_late_is_kept_apart(http, keys, client, store):
    await client.finish("own", 0, Ending(outcome=Outcome.INFRA_ERROR))
    (claim,) = await client.claim(controller="c", limit=1, lease_s=30)
    late = await post_event(http, keys["own"], "own", 0, "reward", {"value": 1.0})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")
    assert (await http.get("/v1/models", headers=bearer(keys["own"]))).status_code == 409
    assert (await post_event(http, claim.agent_key, "own", 1, "reward", {"value": 0.25})).status_code == 200
    ended = await client.finish("own", 1, Ending(outcome=Outcome.OK))
    assert ended.reward == 0.25
    late = await post_event(http, claim.agent_key, "own", 1, "reward", {"value": 1.0})
    call = {"model": "m", "messages": [{"role": "user", "content": "too late"}]}
    late_call = await http.post("/v1/chat/completions", json=call, headers=bearer(claim.agent_key))
    assert (late.status_code, late_call.status_code) == (409, 409)
    events = [(event.event_type, event.attempt) for event in await store.events("own")]
    assert events == [("late.event", 0), ("late.call", 0), ("reward", 1), ("late.event", 1), ("late.call", 1)]
    kept = (await store.events("own"))[-1].data
    assert (kept["path"], kept["body"]) == ("/v1/chat/completions", call)
    assert (await client.get_rollout("own")).reward == 0.25


def test_the_operator_key_is_made_once_readable_by_its_owner_only(tmp_path):
    folder = tmp_path / "run"
    key = operator_key(folder)
    assert (operator_key(folder), len(key) > 40) == (key, True)
    assert stat.S_IMODE(os.stat(folder / "operator.key").st_mode) == 0o600
    assert os.listdir(folder) == ["operator.key"]
    assert operator_key(tmp_path / "other") != key


@pytest.fixture
async def scorer_keys(client, keys):
    return {claim.rollout.spec.id: claim.scorer_key for claim in await client.held(controller="c", lease_s=30)}


async def test_a_scorers_key_is_good_for_the_rewards_of_its_attempt_alone(client, http, scorer_keys):
    key = scorer_keys["a"]
    assert (await post_event(http, key, "a", event_type="reward", data={"value": 0.5})).status_code == 200
    (event,) = await client.events("a", "reward")
    assert event.data == {"value": 0.5}
    assert (await post_event(http, key, "a", event_type="reward", data={"value": "much"})).status_code == 422
    assert (await post_event(http, key, "a", event_type="note")).status_code == 403
    assert (await post_event(http, key, "v", event_type="reward", data={"value": 1})).status_code == 403
    assert (await http.get(MODELS.format("a", 0, "train"), headers=bearer(key))).status_code == 401
    assert (await http.get("/api/rollouts/a", headers=bearer(key))).status_code == 401


async def test_a_scorers_key_dies_with_its_attempt(client, http, scorer_keys):
    await client.finish("a", 0, Ending(outcome=Outcome.OK))
    late = await post_event(http, scorer_keys["a"], "a", event_type="reward", data={"value": 1})
    assert late.status_code == 409
    assert (await client.get_rollout("a")).reward is None


async def test_an_agents_key_does_not_become_a_scorers_by_another_prefix(http, keys):
    forged = "ms" + keys["a"][2:]
    assert (await post_event(http, forged, "a", event_type="reward", data={"value": 1})).status_code == 401
