"""Whatever nodes, people and the API server do to an attempt, it ends, and the agent is not blamed."""

import asyncio

import pytest

from manege.types import Outcome
from tests.system.kubernetes.running import (
    api_of,
    controlling,
    ended,
    jobs,
    python,
    run_config,
    settle,
    spec,
    under_way,
    waits_for,
)

pytestmark = pytest.mark.anyio

DONE = "open('answer.txt', 'w').write('done')"


@pytest.fixture
def disturb(client, kube, cluster, namespace, kubelet, tmp_path):
    """Do something to the pod of a rollout while its agent runs, which then may go on; returns the end."""

    async def disturb(action, *, attempts=1, **changes):
        config = run_config(waits_for(tmp_path / "go", DONE), **changes)
        await client.put_run("run", config.model_dump(mode="json"))
        async with controlling(client, tmp_path, api_of(cluster, namespace)):
            await client.create_rollouts([spec("r", max_attempts=attempts)])
            await action(await under_way(client, kube, namespace, "r"))
            (tmp_path / "go").touch()
            (end,) = await ended(client, "r")
        return end

    return disturb


async def test_an_evicted_pod_is_tried_again(disturb, kubelet):
    end = await disturb(kubelet.evict, attempts=2)
    assert (end.outcome, end.reward, end.attempt) == (Outcome.OK, 1.0, 1)


@pytest.mark.parametrize("how", ["evicted", "preempted", "pod deleted", "job deleted", "node lost"])
async def test_what_happens_to_a_pod_is_not_the_agents_failure(disturb, kube, kubelet, namespace, how):
    async def action(pod):
        if how == "evicted":
            await kubelet.evict(pod)
        elif how == "preempted":
            await kubelet.preempt(pod)
        elif how == "pod deleted":
            await kube.delete(f"/api/v1/namespaces/{namespace}/pods/{pod}")
        elif how == "job deleted":
            (job,) = await jobs(kube, namespace)
            await kube.delete(f"/apis/batch/v1/namespaces/{namespace}/jobs/{job}")
        else:
            await kubelet.crash()
            await kube.until(f"/api/v1/namespaces/{namespace}/pods", _going)

    end = await disturb(action)
    assert (end.outcome, end.reward) == (Outcome.INFRA_ERROR, None)
    assert end.message.startswith(("its pod", "its Job"))


def _going(objects):
    return any("deletionTimestamp" in entry["metadata"] for entry in objects.values())


async def test_memory_over_the_agents_own_limit_is_the_agents_fault(disturb, kubelet):
    async def action(pod):
        kubelet.kill(pod, "agent", reason="OOMKilled")

    end = await disturb(action)
    assert (end.outcome, end.reward) == (Outcome.AGENT_ERROR, 0.0)
    assert "limit of memory" in end.message


@pytest.mark.parametrize("reason", ["ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff"])
async def test_an_image_that_cannot_be_had_is_not_the_agents_fault(
    client, cluster, namespace, kubelet, kube, tmp_path, reason
):
    kubelet.unpullable["local"] = reason
    async with controlling(client, tmp_path, api_of(cluster, namespace)):
        (end,) = await settle(client, run_config(kubernetes={"pending_s": 1}), spec())
        await kube.until(f"/api/v1/namespaces/{namespace}/pods", lambda objects: not objects)
    assert (end.outcome, end.reward) == (Outcome.INFRA_ERROR, None)
    assert reason in end.message


async def test_an_attempt_that_no_node_takes_ends(client, cluster, namespace, kubelet, tmp_path):
    kubelet.schedules = False
    async with controlling(client, tmp_path, api_of(cluster, namespace)):
        (end,) = await settle(client, run_config(kubernetes={"pending_s": 1}), spec())
    assert end.outcome is Outcome.INFRA_ERROR
    assert "Unschedulable" in end.message


ONE_CALL = python("ask(); " + DONE)

FAULTS = {
    "the answer to a creation is lost": ("POST", "/jobs$", {"is_reset": True, "carried_out": True}),
    "a creation is refused for now": ("POST", "/jobs$", {"status": 429, "retry_after_s": 1}),
    "a creation fails": ("POST", "/jobs$", {"status": 500, "times": 3}),
    "a creation meets a conflict": ("POST", "/jobs$", {"status": 409}),
    "the answer to the secret is lost": ("POST", "/secrets$", {"is_reset": True, "carried_out": True}),
    "the secret fails": ("POST", "/secrets$", {"status": 503, "times": 3}),
    "lists fail": ("GET", "/(jobs|pods)\\?.*limit", {"status": 500, "times": 3}),
    "watches begin too late": ("GET", "watch=1", {"stream_error": 410, "times": 4}),
    "watches are refused as too late": ("GET", "watch=1", {"status": 410, "times": 4}),
    "watches are closed after each event": ("GET", "watch=1", {"cut_after": 1, "times": 30}),
    "watches are cut": ("GET", "watch=1", {"is_reset": True, "times": 4}),
    "everything is slow": (".*", ".", {"delay_s": 0.3, "times": 12}),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_what_an_api_server_does_wrong_costs_no_attempt(
    client, cluster, namespace, kubelet, kube, proxy, tmp_path, name
):
    method, path, fault = FAULTS[name]
    for each in ["GET", "POST"] if method == ".*" else [method]:
        proxy.inject(each, path, **fault)
    async with controlling(client, tmp_path, api_of(cluster, namespace, url=proxy.url)):
        (end,) = await settle(client, run_config(ONE_CALL), spec())
    assert (end.outcome, end.reward, end.attempt, end.message) == (Outcome.OK, 1.0, 0, None)
    assert len(await jobs(kube, namespace)) == 1
    assert {status for _, _, status in proxy.requests} & {200, 201}


async def test_a_job_that_the_api_calls_invalid_is_an_infrastructure_failure_with_its_reason(
    client, cluster, namespace, proxy, tmp_path
):
    proxy.inject("POST", "/jobs$", status=422)
    async with controlling(client, tmp_path, api_of(cluster, namespace, url=proxy.url)):
        (end,) = await settle(client, run_config(), spec())
    assert end.outcome is Outcome.INFRA_ERROR
    assert "Kubernetes answered 422 Invalid" in end.message


async def test_a_really_invalid_job_is_an_infrastructure_failure_with_its_reason(client, cluster, namespace, tmp_path):
    config = run_config(kubernetes={"requests": {"memory": "512Mi"}})
    async with controlling(client, tmp_path, api_of(cluster, namespace)):
        (end,) = await settle(client, config, spec())
    assert end.outcome is Outcome.INFRA_ERROR
    assert "422 Invalid" in end.message
    assert "less than or equal to memory limit" in end.message


async def test_an_api_server_that_is_away_while_an_agent_runs_and_ends_is_waited_for(
    client, cluster, namespace, kubelet, kube, proxy, tmp_path
):
    await client.put_run("run", run_config(waits_for(tmp_path / "go", DONE)).model_dump(mode="json"))
    async with controlling(client, tmp_path, api_of(cluster, namespace, url=proxy.url)):
        await client.create_rollouts([spec("r")])
        await under_way(client, kube, namespace, "r")
        await proxy.down()
        (tmp_path / "go").touch()
        await kube.until(f"/apis/batch/v1/namespaces/{namespace}/jobs", _over)
        await proxy.up()
        (end,) = await ended(client, "r")
    assert (end.outcome, end.reward, end.attempt) == (Outcome.OK, 1.0, 0)


def _over(objects):
    return any(entry["status"].get("conditions") for entry in objects.values())


async def test_an_api_server_that_has_forgotten_what_was_watched_is_asked_anew(
    client, cluster, namespace, kubelet, kube, tmp_path
):
    await client.put_run("run", run_config(waits_for(tmp_path / "go", DONE)).model_dump(mode="json"))
    async with controlling(client, tmp_path, api_of(cluster, namespace)):
        await client.create_rollouts([spec("r")])
        await under_way(client, kube, namespace, "r")
        await asyncio.to_thread(cluster.restart_apiserver, compact=True)
        (tmp_path / "go").touch()
        (end,) = await ended(client, "r")
    assert (end.outcome, end.reward, end.attempt) == (Outcome.OK, 1.0, 0)
