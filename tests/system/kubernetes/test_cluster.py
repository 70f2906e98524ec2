"""The Kubernetes of the tests is what they take it for: its API, the node that runs containers, and the faults."""

import asyncio
import json
import os
import select
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest

from tests.system.kubernetes.api import Api
from tests.system.kubernetes.cluster import RESTRICTED

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def api(cluster):
    async with Api(cluster) as opened:
        yield opened


def container(script, *, name="main", **more):
    return {"name": name, "image": "local", "command": ["sh", "-c", script], **more}


def job(*containers, name="work", pod=(), **spec):
    """Tried once."""
    inside = {"restartPolicy": "Never", "containers": list(containers), **dict(pod)}
    return {"metadata": {"name": name}, "spec": {"backoffLimit": 0, "template": {"spec": inside}, **spec}}


def jobs_of(namespace):
    return f"/apis/batch/v1/namespaces/{namespace}/jobs"


def pods_of(namespace):
    return f"/api/v1/namespaces/{namespace}/pods"


def ends(objects):
    """Whether a Job has ended, as a condition of `Api.until`."""
    return any(entry["status"].get("conditions") for entry in objects.values())


def running(objects):
    """Whether a container runs."""
    states = [state for entry in objects.values() for state in entry["status"].get("containerStatuses", [])]
    return any("running" in state["state"] for state in states)


def phase(name):
    return lambda objects: any(entry["status"]["phase"] == name for entry in objects.values())


async def test_a_job_runs_its_containers_in_turn_on_shared_volumes(api, kubelet, namespace):
    await api.create(
        f"/api/v1/namespaces/{namespace}/secrets", {"metadata": {"name": "keys"}, "stringData": {"key": "value"}}
    )
    secret = {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}}
    mount = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}], "env": [secret]}
    first = container('echo "first $SECRET" > /shared/text', name="first", **mount)
    main = container("cat /shared/text /keys/key > /dev/termination-log; echo $$$$", **mount)
    main["volumeMounts"] = [*mount["volumeMounts"], {"name": "keys", "mountPath": "/keys", "readOnly": True}]
    volumes = [{"name": "shared", "emptyDir": {}}, {"name": "keys", "secret": {"secretName": "keys"}}]
    await api.create(jobs_of(namespace), job(main, pod={"initContainers": [first], "volumes": volumes}))

    jobs = await api.until(jobs_of(namespace), ends)
    [pod] = (await api.get(pods_of(namespace)))["items"]

    assert jobs["work"]["status"]["succeeded"] == 1
    [status] = pod["status"]["containerStatuses"]
    assert status["state"]["terminated"]["message"] == "first value\nvalue"
    assert kubelet.output(pod["metadata"]["name"], "main") == "1\n"


async def test_a_pod_waits_for_the_secret_that_it_names(api, kubelet, namespace):
    secret = {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "late", "key": "key"}}}
    await api.create(jobs_of(namespace), job(container('test "$SECRET" = 1', env=[secret])))
    waits = lambda pods: any(  # noqa: E731
        "waiting" in status["state"] for pod in pods.values() for status in pod["status"].get("containerStatuses", [])
    )
    await api.until(pods_of(namespace), waits)
    await api.create(
        f"/api/v1/namespaces/{namespace}/secrets", {"metadata": {"name": "late"}, "stringData": {"key": "1"}}
    )
    jobs = await api.until(jobs_of(namespace), ends)
    assert jobs["work"]["status"]["succeeded"] == 1


async def test_a_failing_command_fails_its_job_with_its_exit_code(api, kubelet, namespace):
    await api.create(jobs_of(namespace), job(container("exit 7")))
    jobs = await api.until(jobs_of(namespace), ends)
    [pod] = (await api.get(pods_of(namespace)))["items"]
    assert jobs["work"]["status"]["conditions"][0]["reason"] == "BackoffLimitExceeded"
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 7


async def test_a_jobs_deadline_kills_all_that_its_pod_runs(api, kubelet, namespace):
    script = "(trap '' TERM; while :; do sleep 1; done) & sleep 1000"
    await api.create(jobs_of(namespace), job(container(script), pod={"terminationGracePeriodSeconds": 0}))
    [pod] = await api.until(pods_of(namespace), running)
    await api.patch(f"{jobs_of(namespace)}/work", {"spec": {"activeDeadlineSeconds": 1}})
    [runs] = kubelet._pods.values()
    pid = runs.containers["main"]._pid
    jobs = await api.until(jobs_of(namespace), ends)
    await api.until(pods_of(namespace), lambda pods: pod not in pods)
    assert jobs["work"]["status"]["conditions"][0]["reason"] == "DeadlineExceeded"
    await runs.over.wait()
    assert runs.containers["main"]._process.returncode == 137
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (lambda kubelet, pod: kubelet.evict(pod), ("Evicted", "Error")),
        (lambda kubelet, pod: asyncio.to_thread(kubelet.kill, pod, "main", reason="OOMKilled"), (None, "OOMKilled")),
    ],
    ids=["evicted", "out of memory"],
)
async def test_a_node_ends_a_pod_for_its_own_reasons(api, kubelet, namespace, fail, reason):
    await api.create(jobs_of(namespace), job(container("sleep 1000")))
    [pod] = await api.until(pods_of(namespace), running)
    await fail(kubelet, pod)
    pods = await api.until(pods_of(namespace), phase("Failed"))
    status = pods[pod]["status"]
    assert (status.get("reason"), status["containerStatuses"][0]["state"]["terminated"]["reason"]) == reason


async def test_a_preempted_pod_says_so_before_it_is_gone(api, kubelet, namespace):
    await api.create(jobs_of(namespace), job(container("sleep 1000"), pod={"terminationGracePeriodSeconds": 0}))
    [pod] = await api.until(pods_of(namespace), running)
    version = (await api.get(pods_of(namespace)))["metadata"]["resourceVersion"]
    await kubelet.preempt(pod)
    seen = []
    async with aclosing(api.events(pods_of(namespace), version=version)) as events:
        async for kind, entry in events:
            if entry["metadata"]["name"] != pod:  # the Job starts anew
                continue
            seen.append((kind, {condition["type"] for condition in entry["status"]["conditions"]}))
            if kind == "DELETED":
                break
    assert seen[-1][0] == "DELETED"
    assert all("DisruptionTarget" in conditions for _, conditions in seen)


async def test_an_image_that_cannot_be_pulled_leaves_its_container_waiting(api, kubelet, namespace):
    kubelet.unpullable["local"] = "ImagePullBackOff"
    await api.create(jobs_of(namespace), job(container("true")))
    waits = lambda pods: any(pod["status"].get("containerStatuses") for pod in pods.values())  # noqa: E731
    [pod] = (await api.until(pods_of(namespace), waits)).values()
    assert pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "ImagePullBackOff"
    await api.delete(f"{jobs_of(namespace)}/work")
    await api.until(pods_of(namespace), lambda pods: not pods)


async def test_a_silent_node_is_found_lost_and_its_pod_is_left_terminating(api, kubelet, namespace):
    await api.create(jobs_of(namespace), job(container("sleep 1000")))
    [pod] = await api.until(pods_of(namespace), running)
    await kubelet.fall_silent()
    ending = lambda pods: "deletionTimestamp" in pods[pod]["metadata"]  # noqa: E731
    pods = await api.until(pods_of(namespace), ending)
    assert pods[pod]["status"]["phase"] == "Running"


async def test_a_restarted_api_server_keeps_its_data_and_has_forgotten_the_past(cluster, api, namespace):
    version = (await api.get(jobs_of(namespace)))["metadata"]["resourceVersion"]
    await api.create(jobs_of(namespace), job(container("true")))
    await asyncio.to_thread(cluster.restart_apiserver, compact=True)
    assert [entry["metadata"]["name"] for entry in (await api.get(jobs_of(namespace)))["items"]] == ["work"]
    async with httpx.AsyncClient(base_url=cluster.url, verify=cluster.tls(), trust_env=False) as client:
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "5"}
        header = {"Authorization": "Bearer admin-token"}
        answer = await client.get(jobs_of(namespace), params=query, headers=header, timeout=30)
    [event] = map(json.loads, answer.text.splitlines())
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


def test_a_user_without_rights_is_refused(cluster, namespace):
    assert cluster.request("GET", jobs_of(namespace), token=RESTRICTED).status_code == 403
    assert cluster.request("GET", jobs_of(namespace), token="none").status_code == 401


def test_nothing_outlives_a_killed_test_run(cluster, tmp_path):
    code = f"""if True:
        import pathlib, sys
        from tests.system.kubernetes.cluster import Cluster
        cluster = Cluster(pathlib.Path({str(tmp_path)!r}))
        cluster.start_etcd()
        pid = cluster._running["etcd"].pid
        while pathlib.Path(f"/proc/{{pid}}/comm").read_text() != "etcd\\n":
            pass
        print(pid, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        etcd = os.pidfd_open(int(run.stdout.readline()))
        run.kill()
        ended, _, _ = select.select([etcd], [], [], 30)
        os.close(etcd)
    assert ended == [etcd]


@pytest.fixture
async def through(cluster, proxy):
    """A client of the proxy."""
    header = {"Authorization": "Bearer admin-token"}
    async with httpx.AsyncClient(base_url=proxy.url, headers=header, trust_env=False, timeout=30) as client:
        yield client


async def test_faults_meet_the_requests_that_they_name(through, proxy, namespace):
    fault = proxy.inject("GET", r"/jobs$", times=2, status=429, retry_after_s=1)
    answers = [await through.get(path) for path in (pods_of(namespace), *3 * [jobs_of(namespace)])]
    assert [answer.status_code for answer in answers] == [200, 429, 429, 200]
    assert answers[1].headers["Retry-After"] == "1"
    assert answers[1].json()["reason"] == "TooManyRequests"
    assert fault.met.is_set()
    assert [status for *_, status in proxy.requests] == [200, 429, 429, 200]


async def test_a_lost_answer_leaves_its_object(through, proxy, namespace):
    proxy.inject("POST", "/jobs$", carried_out=True, is_reset=True)
    with pytest.raises(httpx.TransportError):
        await through.post(jobs_of(namespace), json=job(container("true")))
    again = await through.post(jobs_of(namespace), json=job(container("true")))
    assert (again.status_code, again.json()["reason"]) == (409, "AlreadyExists")


async def test_watches_are_cut_after_lines_or_told_that_they_are_too_old(api, through, proxy, namespace):
    for name in ("one", "two"):
        await api.create(jobs_of(namespace), job(container("true"), name=name))
    query = {"watch": "1", "timeoutSeconds": "60"}
    proxy.inject("GET", "watch=1", cut_after=1)
    proxy.inject("GET", "watch=1", stream_error=410)
    answers = [await through.get(jobs_of(namespace), params=query) for _ in range(2)]
    lines = [[json.loads(line) for line in answer.text.splitlines()] for answer in answers]
    assert [line["type"] for line in lines[0]] == ["ADDED"]
    assert [line["object"]["code"] for line in lines[1]] == [410]


async def test_a_server_that_is_away_refuses_and_comes_back_on_its_port(through, proxy, namespace):
    async with through.stream("GET", jobs_of(namespace), params={"watch": "1"}) as watch:
        await proxy.down()
        with pytest.raises(httpx.TransportError):
            await watch.aread()
    with pytest.raises(httpx.ConnectError):
        await through.get(jobs_of(namespace))
    await proxy.up()
    assert (await through.get(jobs_of(namespace))).status_code == 200
