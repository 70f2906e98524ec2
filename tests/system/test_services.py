"""Services of a run: real processes, reached by agents through the gateway and in no other way."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from manege.cli.machine import Machine
from manege.cli.plan import make_plan
from manege.cli.services import refuse_services, services_started, with_ports
from manege.errors import ConfigError, ServiceError
from manege.sandbox.probe import probe
from manege.store.base import Ending
from manege.types import Outcome, RolloutSpec, Task
from tests.conftest import OPERATOR_KEY, TINY_MODEL
from tests.system.test_controller import run_config, run_one

pytestmark = pytest.mark.anyio

PROGRAM = str(Path(__file__).parents[1] / "service_program.py")
RUN = [sys.executable, PROGRAM, "{port}"]
ASK = """
import json, os, urllib.request
key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["MANEGE_SERVICE_ECHO"] + "/a?b=c", b"body", key, method="PUT")
print(urllib.request.urlopen(request).read().decode())
"""
SCORE = "import json, sys; print(float('PUT' in json.load(sys.stdin)['attempt']['stdout']))"
RUN_FILE = """
name = "run"
model = {{ path = "{model}", device = "cpu" }}
tasks.train = "tasks.jsonl"
agent.run = ["python", "-c", {ask}]
services.echo.run = ["python", "./service_program.py", "{{port}}"]
scorer.run = ["python", "-c", {score}]
"""


def run_of(folder, service=None, **others):
    return run_config(folder=folder, services={"echo": {"run": RUN} | (service or {})}, **others)


@asynccontextmanager
async def agent_of(client, gateway, config):
    """An HTTP client with the key of a running attempt, at the address of the service."""
    await client.put_run("run", config.to_json())
    await client.create_rollouts([RolloutSpec(id="r", run="run", task=Task(id="t", input={}))])
    [claim] = await client.claim(controller="c", limit=1, lease_s=3600)
    base, headers = f"{gateway.url}/proxy/services/echo", {"authorization": f"Bearer {claim.agent_key}"}
    async with httpx.AsyncClient(base_url=base, headers=headers, trust_env=False, timeout=60) as opened:
        yield opened


async def test_a_request_goes_on_as_it_is_and_its_answer_comes_back(client, gateway, tmp_path):
    async with services_started(run_of(tmp_path)) as config, agent_of(client, gateway, config) as agent:
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
            body = "text" if method != "GET" else ""
            answer = await agent.request(method, "/a%2Fb/c?d=%20e", content=body, headers={"x-mine": "1"})
            told = answer.json()
            assert (told["method"], told["path"], told["body"]) == (method, "/a%2Fb/c?d=%20e", body)
            assert answer.headers["x-own"] == "kept"
            sent = {name.lower(): value for name, value in told["headers"].items()}
            assert sent["x-mine"] == "1"
            assert "authorization" not in sent, "the attempt's key went to the service"
        assert (await agent.get("/teapot")).status_code == 418


async def test_an_answer_comes_as_it_is_made_and_one_that_breaks_off_is_not_completed(client, gateway, tmp_path):
    async with services_started(run_of(tmp_path)) as config, agent_of(client, gateway, config) as agent:
        async with agent.stream("GET", "/parts") as answer:
            parts = answer.aiter_raw()
            assert await anext(parts) == b"one "
            await agent.post("/go")
            assert await anext(parts) == b"two"
        with pytest.raises(httpx.RemoteProtocolError):
            await agent.get("/breaks")


async def test_only_a_living_attempt_reaches_a_service_and_only_those_of_its_run(client, gateway, tmp_path):
    async with services_started(run_of(tmp_path)) as config, agent_of(client, gateway, config) as agent:
        wrong = await agent.get("/a", headers={"authorization": "Bearer mk-0-x-r"})
        operator = await agent.get("/a", headers={"authorization": f"Bearer {OPERATOR_KEY}"})
        unknown = await agent.get(f"{gateway.url}/proxy/services/other/a")
        outside = await agent.get(f"{gateway.url}/proxy/services/echo/%2e%2e/a")
        assert [answer.status_code for answer in (wrong, operator, unknown, outside)] == [401, 403, 404, 404]
        assert "no service 'other'; it has echo" in unknown.json()["error"]["message"]
        assert (await agent.post("/a", content=bytes(64 * 2**20 + 1))).status_code == 413
        await client.finish("r", 0, Ending(outcome=Outcome.OK, reward=1.0))
        late = await agent.post("/a", json={"query": "too late"})
        assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")
        assert [event.data["body"] for event in await client.events("r", "late.call")] == [{"query": "too late"}]


async def test_a_service_that_is_killed_comes_back_where_it_was_and_requests_wait_for_it(client, gateway, tmp_path):
    async with services_started(run_of(tmp_path)) as config, agent_of(client, gateway, config) as agent:
        first = (await agent.get("/a")).json()["pid"]
        os.kill(first, signal.SIGKILL)
        await _until_gone(first)
        second = (await agent.get("/a")).json()["pid"]
        assert second != first
        assert (tmp_path / "services" / "echo.log").read_text().count(PROGRAM) == 2
    await _until_gone(second)


async def test_a_service_that_does_not_start_again_ends_the_run_with_the_end_of_its_log(tmp_path):
    broken = tmp_path / "broken"

    async def run_until_it_breaks():
        async with services_started(run_of(tmp_path, {"run": [*RUN, str(broken)]})) as config:
            async with httpx.AsyncClient(trust_env=False) as http:
                pid = (await http.get(f"{config.services['echo'].address}/a")).json()["pid"]
            broken.touch()
            os.kill(pid, signal.SIGKILL)
            await asyncio.get_running_loop().create_future()

    with pytest.raises(ServiceError, match=r"(?s)service echo ended while it started, with code 1.*no, thanks"):
        await run_until_it_breaks()


async def test_a_service_that_is_away_is_an_error_with_its_name_and_what_to_do(client, gateway, tmp_path):
    service = {"url": with_ports(run_of(tmp_path)).services["echo"].address, "timeout_s": 0.1}
    config = run_config(services={"echo": service})
    async with agent_of(client, gateway, config) as agent:
        answer = await agent.get("/a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "service_error")
    assert f"service echo at {service['url']} did not answer" in answer.json()["error"]["message"]


async def test_an_agent_in_its_sandbox_reaches_the_service_of_its_run(client, tmp_path):
    programs = {"agent": [sys.executable, "-c", ASK], "scorer": [sys.executable, "-c", SCORE]}
    async with services_started(run_of(tmp_path, **programs)) as config:
        rollout = await run_one(client, tmp_path, config)
    assert rollout.reward == 1.0, rollout.evidence
    told = json.loads(rollout.evidence["stdout_tail"])
    assert (told["method"], told["path"], told["body"]) == ("PUT", "/a?b=c", "body")


def test_a_run_file_starts_its_services_and_ends_them(tmp_path):
    (tmp_path / "run.toml").write_text(RUN_FILE.format(model=TINY_MODEL, ask=json.dumps(ASK), score=json.dumps(SCORE)))
    (tmp_path / "tasks.jsonl").write_text('{"id": "t", "input": {}}')
    (tmp_path / "service_program.py").write_text(Path(PROGRAM).read_text())
    command = [sys.executable, "-c", "from manege.cli.main import main; raise SystemExit(main())", "run", "run.toml"]
    command += [f"folder={tmp_path / 'run'}", f"sandbox.unsafe={str(not probe().isolates).lower()}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert "outcome ok, reward 1" in done.stdout, done.stdout + done.stderr
    [stdout] = (tmp_path / "run").glob("rollouts/*/0/stdout.txt")
    assert not Path(f"/proc/{json.loads(stdout.read_text())['pid']}").exists()


def test_a_gateway_elsewhere_takes_only_addresses(tmp_path):
    with pytest.raises(ConfigError, match=r"services.echo.run does nothing with a gateway elsewhere"):
        refuse_services(run_of(tmp_path))
    refuse_services(run_config(services={"echo": {"url": "http://somewhere:80"}}))


@pytest.mark.parametrize(
    ("service", "wanted"),
    [
        ({}, "set either url or run"),
        ({"url": "http://a", "run": RUN}, "set either url or run"),
        ({"url": "localhost:80"}, "is no address"),
        ({"url": "http://a", "port": 80}, "port and start_s do nothing here"),
        ({"run": ["serve"]}, "put {port} into it"),
    ],
)
def test_what_cannot_be_a_service_is_refused(service, wanted):
    with pytest.raises(ValueError, match=wanted):
        run_config(services={"echo": service})


def test_ports_are_no_settings_and_what_is_started_is(tmp_path):
    config = run_of(tmp_path)
    assert with_ports(config).digest() == config.digest()
    assert run_of(tmp_path, {"run": [*RUN, "more"]}).digest() != config.digest()


def test_a_plan_has_the_command_of_a_service(tmp_path):
    config = run_of(tmp_path, {"port": 8123}, model={"path": str(TINY_MODEL), "device": "cpu"})
    shape = json.loads((TINY_MODEL / "config.json").read_text())
    plan = make_plan(config, shape, TINY_MODEL, Machine(num_gpus=0, gpu_bytes=0, memory_bytes=None, is_here=True))
    assert f"{PROGRAM} 8123" in dict(dict(plan.sections)["processes"])["service echo"]


async def _until_gone(pid):
    """Its keeper reaps it."""
    while Path(f"/proc/{pid}").exists():
        await asyncio.sleep(0.01)
