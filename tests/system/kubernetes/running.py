"""A controller of Jobs for the tests: its cluster, its runs, and agents that ask a model with nothing but Python."""

import asyncio
import contextlib
import sys
import uuid

import httpx2

from manege.config import ControllerConfig, RunConfig, SandboxConfig
from manege.controller.kubernetes.api import Api
from manege.controller.kubernetes.names import rollout_label
from manege.controller.kubernetes.runner import KubernetesRunner
from manege.controller.loop import Controller
from manege.types import RolloutSpec, Task
from tests.controllers import beside
from tests.system.kubernetes.cluster import ADMIN

ASK = """
import json, os, urllib.request
def post(url, key, body):
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30))
def ask():
    body = {"model": "m", "messages": [{"role": "user", "content": os.environ.get("QUESTION", "q")}], "max_tokens": 4}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"], body)
"""


def python(code):
    """A command that runs it, with `ask()` and `post()`."""
    return [sys.executable, "-c", ASK + code]


ONE_CALL = python("ask(); open('answer.txt', 'w').write('done')")
GOOD = ["sh", "-c", "test -f /workspace/answer.txt && echo 1 || echo 0"]


def run_config(agent=ONE_CALL, scorer=GOOD, *, limits=None, kubernetes=None, **changes):
    return RunConfig.model_validate(
        {
            "name": "run",
            "tasks": {"train": "tasks.jsonl"},
            "agent": {
                "run": agent,
                "env": {"QUESTION": "{question}"},
                "limits": {"run_s": 30, "score_s": 20, "memory_mb": 256} | (limits or {}),
                **changes.pop("agent", {}),
            },
            "scorer": {"run": scorer, **changes.pop("scoring", {})},
            "kubernetes": {"image": "local", **(kubernetes or {})},
            **changes,
        }
    )


def spec(name=None, **changes):
    task = Task(id="t", input={"question": "why?"}, hidden={"answer": "secret"})
    name = name or f"r-{uuid.uuid4().hex[:6]}"
    return RolloutSpec(**({"id": name, "run": "run", "task": task, "max_attempts": 1} | changes))


def api_of(cluster, namespace, *, url=None, token=ADMIN, name="cluster"):
    """`url`: another way to it, such as a proxy."""
    http = httpx2.AsyncClient(
        base_url=url or cluster.url,
        headers={"Authorization": f"Bearer {token}"},
        verify=cluster.tls(),
        trust_env=False,
        timeout=30,
    )
    return Api(http, name=name, namespace=namespace)


@contextlib.asynccontextmanager
async def controlling(client, folder, *apis, name="kubernetes", **changes):
    """A controller beside the body; it is stopped at the end, and its Jobs go on."""
    settings = ControllerConfig(**({"slots": 16, "retry_s": 0, "lease_s": 60} | changes))
    folder = folder / name
    runner = KubernetesRunner(client, name=name, folder=folder, apis=apis, jobs_per_minute=6000)
    controller = Controller(
        client, name=name, folder=folder, config=settings, sandbox=SandboxConfig(unsafe=True), runner=runner
    )
    async with beside(controller):
        yield controller


async def jobs(kube, namespace):
    """By name."""
    listed = await kube.get(f"/apis/batch/v1/namespaces/{namespace}/jobs")
    return {entry["metadata"]["name"]: entry for entry in listed["items"]}


async def ended(client, *ids):
    """Wait for the ends of rollouts, in their order."""
    found, cursor = {}, 0
    while not found.keys() >= set(ids):
        page = await client.terminal(run="run", after=cursor, wait_s=30)
        cursor = page.cursor
        found |= {rollout.spec.id: rollout for rollout in page.rollouts}
    return [found[each] for each in ids]


async def settle(client, config, *specs):
    """Create rollouts of a run and wait for their ends."""
    await client.put_run("run", config.model_dump(mode="json"))
    await client.create_rollouts(list(specs))
    return await ended(client, *[each.id for each in specs])


def waits_for(path, then=""):
    """An agent that asks once, and goes on when the file is there."""
    return python(f"import time\nask()\nwhile not os.path.exists({str(path)!r}): time.sleep(0.02)\n{then}")


async def under_way(client, kube, namespace, rollout_id):
    """The pod whose agent runs and has been answered: its name."""
    path = f"/api/v1/namespaces/{namespace}/pods"

    def runs(objects):
        states = [each for entry in objects.values() for each in entry["status"].get("initContainerStatuses", [])]
        states += [each for entry in objects.values() for each in entry["status"].get("containerStatuses", [])]
        return any(each["name"] == "agent" and "running" in each["state"] for each in states)

    found = await kube.until(path, runs, labelSelector=f"manege/rollout={rollout_label(rollout_id)}")
    while not (await client.calls([rollout_id]))[rollout_id]:
        await asyncio.sleep(0.02)
    return next(iter(found))
