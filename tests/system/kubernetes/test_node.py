"""Real Jobs in real containers, on a real node (see `node.py`)."""

import os

import pytest

from tests.system.kubernetes import images
from tests.system.kubernetes.api import Api
from tests.system.kubernetes.cluster import Cluster, built
from tests.system.kubernetes.conftest import needs
from tests.system.kubernetes.node import PAUSE, Node

pytestmark = [pytest.mark.anyio, pytest.mark.full]

IMAGE = "registry.local/agent:1"
JOBS, PODS = "/apis/batch/v1/namespaces/default/jobs", "/api/v1/namespaces/default/pods"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A cluster of its own with its node: pairs of both."""
    needs("kube-apiserver", "kube-controller-manager", "kubelet", "kube-scheduler")
    if os.geteuid() != 0:
        pytest.skip("a node needs root: it makes networks, mounts and control groups")
    folder = tmp_path_factory.mktemp("node")
    busybox = built() / "root/bin/busybox"
    archives = [folder / "pause.tar", folder / "agent.tar"]
    images.build(archives[0], PAUSE, busybox=busybox, command=("sleep", "1000000"))
    images.build(archives[1], IMAGE, busybox=busybox, with_python=True)
    with Cluster(folder / "cluster") as cluster, Node(cluster, folder / "node", archives) as node:
        yield cluster, node


@pytest.fixture
async def api(whole):
    async with Api(whole[0]) as opened:
        yield opened


async def finished(api, name, script, **limits):
    """The container's terminated state after a Job of this script."""
    container = {"name": "main", "image": IMAGE, "command": ["sh", "-c", script], "resources": {"limits": limits}}
    pod = {"restartPolicy": "Never", "containers": [container], "automountServiceAccountToken": False}
    await api.create(JOBS, {"metadata": {"name": name}, "spec": {"backoffLimit": 0, "template": {"spec": pod}}})
    ended = lambda pods: any(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in pods.values())  # noqa: E731
    [pod] = (await api.until(PODS, ended, labelSelector=f"job-name={name}")).values()
    return pod["status"]["containerStatuses"][0]["state"]["terminated"]


async def test_a_pod_reaches_what_is_exposed_to_it_and_nothing_else(api, whole, gateway):
    url = whole[1].expose(int(gateway.url.rpartition(":")[2]))
    asked = f"""python3 -c 'import urllib.request as r; print(r.urlopen("{url}/healthz").status)'"""
    others = "for to in 127.0.0.1:1 192.0.2.1:80; do nc -w 2 ${to%:*} ${to#*:} 2>&1; done"
    ended = await finished(api, "egress", f"({asked}; {others}) > /dev/termination-log 2>&1; true")
    said = [line.rpartition(": ")[2] for line in ended["message"].splitlines()]
    assert said == ["200", "Connection refused", "Network is unreachable"]


async def test_a_container_over_its_memory_is_said_to_be(api):
    ended = await finished(api, "memory", 'python3 -c "bytearray(200 << 20)"', memory="64Mi")
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
