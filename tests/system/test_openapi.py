"""The OpenAPI description is true: it has every route, and nothing that schemathesis makes of it crashes the gateway.

schemathesis is a synchronous client, so it runs in a thread beside the event loop that serves.
"""

import asyncio
import html
import re

import httpx
import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from manege.types import RolloutSpec, Task
from tests.conftest import OPERATOR_KEY

pytestmark = pytest.mark.anyio

CHECKED = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
LIMIT_S = 5
"""For any answer; requests that ask the gateway to wait are made to wait for nothing."""

LONG = "/proxy/rollout/"
"""The long paths lead to the same handlers as the short ones, and the operator's key calls models only by them."""


@pytest.fixture
async def http(gateway):
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30) as opened:
        yield opened


@pytest.fixture
async def description(http):
    return (await http.get("/openapi.json")).json()


@pytest.fixture
async def keys(client):
    """By who has it. Agent `calls` only calls, so that its attempt stays alive; what ends attempts gets `ends`."""
    await client.create_rollouts(
        [RolloutSpec(id=name, run="r", task=Task(id="t", input={}), reward_from="agent") for name in ("calls", "ends")]
    )
    claims = {claim.rollout.spec.id: claim for claim in await client.claim(controller="c", limit=2, lease_s=3600)}
    return {"operator": OPERATOR_KEY, "agent": claims["calls"].agent_key}


async def test_every_route_of_the_gateway_is_described(gateway, description):
    served = {
        (method.lower(), route.path_format)
        for route in gateway.app.routes
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    }
    assert all(isinstance(route, Route) for route in gateway.app.routes)
    assert {(method, path) for path, methods in description["paths"].items() for method in methods} == served
    operations = [operation for methods in description["paths"].values() for operation in methods.values()]
    assert all(operation["summary"] for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)


async def test_a_route_asks_for_a_key_just_where_the_description_says_so(http, description):
    values = {"attempt": "0", "mode": "train", "action": "m:countTokens"}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            concrete = re.sub(r"{(\w+)}", lambda found: values.get(found[1], "x"), path)
            answer = await http.request(method, concrete)
            assert (answer.status_code == 401) == ("security" in operation), (method, path, answer.text)


async def test_a_key_that_the_description_names_is_taken(http, description):
    for scheme in description["components"]["securitySchemes"].values():
        given = {scheme.get("name", "authorization"): f"{'Bearer ' * (scheme['type'] == 'http')}{OPERATOR_KEY}"}
        place = {"params": given} if scheme.get("in") == "query" else {"headers": given}
        assert (await http.get("/proxy/state", **place)).status_code == 200


async def test_bodies_and_parameters_are_those_that_the_handlers_check(description):
    paths = description["paths"]
    finish = paths["/api/rollouts/{rollout_id}/attempt/{attempt}/finish"]["post"]
    body = finish["requestBody"]["content"]["application/json"]["schema"]
    assert (body["required"], body["additionalProperties"]) == (["outcome"], False)
    assert body["properties"]["outcome"]["$ref"] == "#/components/schemas/Outcome"
    assert "agent_timeout" in description["components"]["schemas"]["Outcome"]["enum"]
    parameters = {each["name"]: each["schema"] for each in paths["/api/rollouts/terminal"]["get"]["parameters"]}
    assert set(parameters) == {"format", "run", "after", "limit", "wait_s"}
    assert (parameters["wait_s"]["minimum"], parameters["wait_s"]["maximum"]) == (0, 300)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/api/rollouts/terminal?wait_s=301", "wait_s"),
        ("/api/rollouts/terminal?wait_s=nan", "wait_s"),
        ("/api/rollouts/terminal?wait_s=", "wait_s"),
        ("/api/rollouts/terminal?after=99999999999999999999", "after"),
        ("/api/rollouts?limit=0", "limit"),
        ("/api/rollouts?state_in=running&state_in=asleep", "state_in.1"),
        ("/api/rollouts/x?format=yaml", "format"),
        ("/api/rollouts/x/events?format=yaml", "format"),
    ],
)
async def test_a_wrong_parameter_is_422_and_named(http, path, field):
    answer = await http.get(path, headers={"x-api-key": OPERATOR_KEY})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].startswith(f"{field}: ")


async def test_the_page_shows_every_operation_and_needs_nothing_from_elsewhere(http, description):
    answer = await http.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for path, methods in description["paths"].items():
        for method in methods:
            assert f"<b>{method.upper()}</b> <code>{html.escape(path)}</code>" in answer.text
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://", answer.text)


@pytest.mark.parametrize("who", ["operator", "agent"])
async def test_what_schemathesis_sends_never_crashes_the_gateway(gateway, keys, who):
    assert await asyncio.to_thread(_fuzz, gateway.url, keys[who], num_examples=5) == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("who", ["operator", "agent"])
async def test_much_of_what_schemathesis_sends_never_crashes_the_gateway(gateway, keys, who):
    assert await asyncio.to_thread(_fuzz, gateway.url, keys[who], num_examples=100, with_long_paths=True) == []


def _fuzz(url, key, *, num_examples, with_long_paths=False):
    """What went wrong with requests that fit the description, and such that do not; the same ones at every run."""
    settings = hypothesis.settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    failures = []
    with requests.Session() as session:
        session.trust_env = False
        session.headers["authorization"] = f"Bearer {key}"
        for operation in operations:
            if _opens(key, operation) and (with_long_paths or not operation.path.startswith(LONG)):
                for mode in GenerationMode:
                    try:
                        settings(_sends(operation, mode, session))()
                    except Unsatisfiable:
                        assert mode is GenerationMode.NEGATIVE, operation.label  # everything fits
                    except (AssertionError, BaseExceptionGroup) as failure:
                        failures.append(f"{operation.label} ({mode}): {failure}")
    return failures


def _opens(key, operation):
    """Whether more than a refusal comes of it."""
    is_agents = operation.definition.raw.get("x-key") == "agent"
    return is_agents == (key != OPERATOR_KEY) or operation.path.startswith(LONG)


def _sends(operation, mode, session):
    """A property of one operation."""
    is_ending = operation.path.startswith("/api/rollouts/")
    real = {"rollout_id": "ends" if is_ending else "calls", "attempt": 0, "mode": "train"}

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), is_real=st.booleans())
    def send(case, is_real):
        if is_real and case.path_parameters:
            case.path_parameters |= {name: value for name, value in real.items() if name in case.path_parameters}
        for given in (case.query, case.body):
            if isinstance(given, dict) and isinstance(given.get("wait_s"), int | float):
                given["wait_s"] = min(given["wait_s"], 0)
        answer = case.call(session=session, timeout=4 * LIMIT_S)
        assert answer.elapsed < LIMIT_S
        case.validate_response(answer, checks=CHECKED)
        if operation.path == "/proxy/pause":
            session.post(f"{operation.base_url}/proxy/resume")

    return send
