"""Our own API over a real socket: the typed client, errors, long polls, pause and weights, start and stop."""

import asyncio
import socket
import sqlite3
import time

import httpx
import pytest

from manege.client import Client
from manege.engine.base import Weights
from manege.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
    UnprocessableError,
)
from manege.gateway.hold import Gate, Pause
from manege.gateway.server import GatewayServer
from manege.store.base import Ending
from manege.types import Outcome, RolloutSpec, RolloutState, Task
from tests.calls import make_call
from tests.conftest import OPERATOR_KEY, gateway_app

pytestmark = pytest.mark.anyio


@pytest.fixture
async def http(gateway):
    headers = {"authorization": f"Bearer {OPERATOR_KEY}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, trust_env=False, timeout=30) as opened:
        yield opened


def spec(name, **changes):
    return RolloutSpec(**{"id": name, "run": "run", "task": Task(id="t", input={"q": 1}, hidden={"a": 2}), **changes})


async def finish(client, name, attempt=0, outcome=Outcome.OK, reward=1.0):
    return await client.finish(name, attempt, Ending(outcome=outcome, reward=reward, evidence={"exit_code": 0}))


async def test_rollouts_are_listed_by_run_state_group_and_time_in_pages(client, http):
    created = await client.create_rollouts([spec(f"r{n}", run="xy"[n % 2], group=f"g{n % 3}") for n in range(9)])
    await client.claim(controller="c", limit=2, lease_s=30)
    await client.cancel("r2")

    async def listed(**query):
        answer = await http.get("/api/rollouts", params={"format": "manege", **query})
        return [each["spec"]["id"] for each in answer.json()["rollouts"]], answer.json()["cursor"]

    assert (await listed(run="y"))[0] == ["r1", "r3", "r5", "r7"]
    assert (await listed(group="g2"))[0] == ["r2", "r5", "r8"]
    assert (await listed(state=["running", "cancelled"]))[0] == ["r0", "r1", "r2"]
    assert (await listed(state="queuing", run="x"))[0] == ["r4", "r6", "r8"]
    assert (await listed(until_s=created[0].created_s))[0] == []
    assert len((await listed(since_s=created[0].created_s))[0]) == 9
    seen, cursor = [], 0
    while page := (found := await listed(limit=4, after=cursor))[0]:
        seen, cursor = seen + page, found[1]
    assert seen == [f"r{n}" for n in range(9)]
    assert (await http.get("/api/rollouts", params={"format": "manege", "after": -1})).status_code == 422


async def test_a_rollout_goes_from_creation_to_the_feed_through_the_client(client, store):
    run = await client.put_run("run", {"agent": {"run": ["true"]}})
    assert await client.get_run("run") == run
    (created,) = await client.create_rollouts([spec("a")])
    assert created.spec == spec("a")
    (claim,) = await client.claim(controller="c", limit=4, lease_s=30)
    assert (claim.rollout.spec, claim.rollout.state) == (spec("a"), RolloutState.RUNNING)
    assert await client.renew(controller="c", rollout_ids=["a", "b"], lease_s=30) == ["b"]
    await store.add_call(make_call("c1", [1, 2], [3], rollout="a", logprobs=[-0.25]))
    await client.add_event("a", 0, "note", {"text": "ü"})
    ended = await finish(client, "a", reward=0.5)
    assert (ended.state, ended.reward, ended.evidence) == (RolloutState.SUCCEEDED, 0.5, {"exit_code": 0})
    assert await client.get_rollout("a") == ended
    page = await client.terminal(run="run", after=0)
    assert (list(page.rollouts), page.cursor) == ([ended], 1)
    (call,) = (await client.calls(["a"]))["a"]
    assert (call.prompt_ids_P.tolist(), call.response_ids_R.tolist(), call.logprobs_R.tolist()) == (
        [1, 2],
        [3],
        [-0.25],
    )
    assert (await client.terminal(run="other", after=0)).rollouts == []
    assert (await client.cancel("a")).state is RolloutState.SUCCEEDED


async def test_errors_come_back_as_our_classes(client, gateway):
    with pytest.raises(NotFoundError, match="rollout 'none' does not exist"):
        await client.get_rollout("none")
    with pytest.raises(NotFoundError, match="/api/runs/a/b"):
        await client.get_run("a/b")
    await client.create_rollouts([spec("a")])
    with pytest.raises(ConflictError, match="queuing and cannot become succeeded"):
        await finish(client, "a")
    with pytest.raises(UnprocessableError, match="rollout id"):
        await client.create_rollouts([spec("../a")])
    with pytest.raises(UnprocessableError, match="max_attempts"):
        await client.create_rollouts([spec("b", max_attempts=0)])
    async with Client(gateway.url, "mo-wrong") as stranger:
        with pytest.raises(UnauthorizedError):
            await stranger.get_rollout("a")


async def test_a_gateway_that_is_away_is_reported_after_bounded_retries():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with Client(f"http://127.0.0.1:{port}", "k") as client:
        with pytest.raises(UnavailableError, match="is the gateway running"):
            await client.state()


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"3", b"\xff\xfe", b"{", b'{"a": "\\ud800"}', b"null"])
async def test_a_body_that_is_no_object_is_400_with_our_error_object(http, body):
    paths = ["/api/leases", "/api/leases/renew", "/api/calls", "/proxy/pause", "/proxy/weights"]
    requests = [http.post(path, content=body) for path in paths]
    answers = [await request for request in [*requests, http.put("/api/runs/r", content=body)]]
    answers.append(await http.post("/api/rollouts/a/attempt/0/finish", content=body))
    answers.append(await http.patch("/api/rollouts/a", content=body))
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["status"], error["code"]) == (400, 400, "invalid_request_error")
        assert error["message"]


async def test_what_is_nested_too_deeply_to_be_read_again_is_refused_and_spoils_nothing(http, client):
    paths = {
        "/api/rollouts": '[{"input": %s}]',
        "/api/rollouts/batch": '[{"id": "a", "run": "r", "task": {"id": "t", "input": {"a": %s}}}]',
        "/api/leases": '{"a": %s}',
    }
    for depth in (101, 200, 100_000):
        for path, body in paths.items():
            answer = await http.post(path, content=body % ("[" * depth + "]" * depth))
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request_error")
    answer = await http.post("/api/rollouts", content='[{"input": %s}]' % ("[" * 98 + "]" * 98))
    assert answer.status_code == 201
    (claim,) = await client.claim(controller="c", limit=9, lease_s=30)
    assert (await http.get(f"/api/rollouts/{claim.rollout.spec.id}")).status_code == 200


async def test_metadata_that_only_the_gateway_may_write_is_refused(client, http):
    with pytest.raises(UnprocessableError, match=r"metadata\.agent_lightning"):
        await client.create_rollouts([spec("a", metadata={"agent_lightning": {}})])
    assert (await http.get("/api/rollouts")).json() == []


@pytest.mark.parametrize("reward", [b'"0.5"', b"NaN", b"Infinity", b"-Infinity", b"true", b"[1]", b"{}"])
async def test_a_reward_that_is_no_finite_number_is_refused(http, client, reward):
    await client.create_rollouts([spec("a", reward_from="agent")])
    (claim,) = await client.claim(controller="c", limit=1, lease_s=30)
    ended = await http.post("/api/rollouts/a/attempt/0/finish", content=b'{"outcome": "ok", "reward": %s}' % reward)
    posted = await http.post(
        "/api/rollouts/a/attempt/0/events",
        content=b'{"event_type": "reward", "data": {"value": %s}}' % reward,
        headers={"authorization": f"Bearer {claim.agent_key}"},
    )
    status = 400 if reward in (b"NaN", b"Infinity", b"-Infinity") else 422  # JSON has no such numbers
    assert [answer.status_code for answer in (ended, posted)] == [status, status]
    assert (await client.get_rollout("a")).state is RolloutState.RUNNING


@pytest.mark.parametrize("reward", [0.5, 1, -0.25, 1e-300])
async def test_a_finite_reward_is_kept_as_it_is(client, reward):
    await client.create_rollouts([spec("a")])
    await client.claim(controller="c", limit=1, lease_s=30)
    assert (await finish(client, "a", reward=reward)).reward == reward


async def test_unknown_routes_and_methods_get_our_error_object(http):
    assert (await http.get("/api/nothing")).json()["error"]["code"] == "not_found"
    assert (await http.delete("/api/leases")).json()["error"]["status"] == 405


async def test_a_waiting_claim_gets_what_is_created_and_a_waiting_reader_what_ends(client):
    claiming = asyncio.create_task(client.claim(controller="c", limit=9, lease_s=30, wait_s=60))
    reading = asyncio.create_task(client.terminal(run="run", after=0, wait_s=60))
    await asyncio.sleep(0.1)
    assert not claiming.done()
    await client.create_rollouts([spec("a")])
    assert [claim.rollout.spec.id for claim in await claiming] == ["a"]
    assert not reading.done()
    await client.cancel("a")
    assert [rollout.spec.id for rollout in (await reading).rollouts] == ["a"]


async def test_a_wait_ends_empty_when_its_time_is_over(client):
    assert await client.claim(controller="c", limit=1, lease_s=30, wait_s=0.1) == []
    page = await client.terminal(run=None, after=5, wait_s=0.1)
    assert (page.rollouts, page.cursor) == ([], 5)


async def test_a_claimer_that_hung_up_takes_nothing(client, http):
    body = {"controller": "gone", "limit": 9, "lease_s": 30, "wait_s": 60}
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/api/leases", json=body, timeout=0.2)
    await asyncio.sleep(0.1)
    await client.create_rollouts([spec("a")])
    assert (await client.get_rollout("a")).state is RolloutState.QUEUING


async def test_many_controllers_and_readers_miss_nothing_and_see_nothing_twice(client):
    names = [f"r{number}" for number in range(60)]
    carried_out, seen = [], []

    async def control(controller):
        while len(carried_out) < len(names):
            for claim in await client.claim(controller=controller, limit=3, lease_s=30, wait_s=0.5):
                carried_out.append(claim.rollout.spec.id)
                await finish(client, claim.rollout.spec.id)

    async def read():
        cursor = 0
        while len(seen) < len(names):
            page = await client.terminal(run="run", after=cursor, limit=7, wait_s=5)
            seen.extend(rollout.spec.id for rollout in page.rollouts)
            cursor = page.cursor

    async def create(part):
        for name in part:
            await client.create_rollouts([spec(name)])

    await asyncio.gather(*[control(f"c{n}") for n in range(4)], read(), *[create(names[n::3]) for n in range(3)])
    assert sorted(carried_out) == sorted(seen) == sorted(names)


async def test_weights_change_only_while_paused_and_get_growing_versions(client, engine):
    with pytest.raises(ConflictError, match="only while the gateway is paused"):
        await client.publish(Weights(kind="shared"))
    await client.pause(drain_s=1)
    assert [await client.publish(Weights(kind="shared")) for _ in range(2)] == [1, 2]
    assert (await client.state())["paused"]
    await client.resume()
    state = await client.state()
    assert (state["paused"], state["version"], (await engine.info()).version) == (False, 2, 2)
    with pytest.raises(ConflictError):
        await client.publish(Weights(kind="shared"))


async def test_a_pause_waits_for_calls_in_flight_and_holds_new_ones(client, gateway):
    gate = gateway.services.gate
    order = []

    async def call(name, release):
        async with gate.enter():
            order.append(f"{name} in")
            await release.wait()
            order.append(f"{name} out")

    release = asyncio.Event()
    first = asyncio.create_task(call("first", release))
    await asyncio.sleep(0)
    pausing = asyncio.create_task(client.pause(drain_s=30))
    while not (await client.state())["paused"]:
        await asyncio.sleep(0.01)
    second = asyncio.create_task(call("second", release))
    await asyncio.sleep(0)
    state = await client.state()
    assert (state["inflight"], state["held"], order) == (1, 1, ["first in"])
    release.set()
    await pausing
    assert order == ["first in", "first out"]
    await client.resume()
    await asyncio.gather(first, second)
    assert order[2:] == ["second in", "second out"]


async def test_a_held_call_is_refused_when_the_pause_lasts_too_long_or_the_gateway_ends():
    gate = Gate(time.time)
    gate.hold(Pause(id="p", reason=None, since_s=0.0))
    with pytest.raises(UnavailableError, match="paused for"):
        async with gate.enter(hold_s=0.05):
            pass
    gate.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        async with gate.enter():
            pass
    assert (gate.num_held, gate.num_in_flight) == (0, 0)


async def test_a_store_that_fails_is_503_with_retry_after(http, tmp_path):
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    answer = await http.put("/api/runs/run", json={"config": {}})
    other.close()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_error")
    assert int(answer.headers["retry-after"]) > 0
    assert (await http.put("/api/runs/run", json={"config": {}})).status_code == 200


async def test_a_pause_that_was_overtaken_by_a_resume_says_so(client, gateway):
    async with gateway.services.gate.enter():
        pausing = asyncio.create_task(client.pause(drain_s=30))
        while not (await client.state())["paused"]:
            await asyncio.sleep(0.01)
        await client.resume()
        with pytest.raises(ConflictError, match="resumed while"):
            await pausing
    assert not (await client.state())["paused"]


async def test_the_state_counts_the_rollouts_of_a_run(client):
    await client.create_rollouts([spec("a"), spec("b", run="other")])
    assert (await client.state(run="run"))["rollouts"] == dict.fromkeys(RolloutState, 0) | {"queuing": 1}
    assert (await client.state())["rollouts"]["queuing"] == 2


async def test_metrics_count_rollouts_by_state_and_health_needs_no_key(client, http, gateway):
    await client.create_rollouts([spec("a"), spec("b")])
    await client.cancel("b")
    text = (await http.get("/metrics")).text
    assert 'manege_rollouts{state="queuing"} 1\n' in text
    assert 'manege_rollouts{state="cancelled"} 1\n' in text
    assert "# TYPE manege_calls_total counter\nmanege_calls_total 0\n" in text
    async with httpx.AsyncClient(trust_env=False) as stranger:
        assert (await stranger.get(f"{gateway.url}/healthz")).json() == {"status": "ok"}


async def test_stopping_ends_long_polls_with_what_they_have(gateway):
    async with Client(gateway.url, OPERATOR_KEY) as client:
        claiming = asyncio.create_task(client.claim(controller="c", limit=1, lease_s=30, wait_s=60))
        await asyncio.sleep(0.2)
        await gateway.stop()
        assert await claiming == []


async def test_a_port_in_use_and_an_open_address_without_a_key_are_refused(gateway, store, engine):
    app = gateway_app(store, engine)
    port = int(gateway.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1 port {port}"):
        await GatewayServer(app, port=port).start()
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0.*gateway\.key"):
        GatewayServer(app, host="0.0.0.0")
    async with GatewayServer(app, host="0.0.0.0", has_explicit_key=True) as open_server:
        assert open_server.url.startswith("http://0.0.0.0:")
