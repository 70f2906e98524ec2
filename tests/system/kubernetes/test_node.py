"""Real Jobs in real containers, on a real node (see `node.py`)."""

import os

import pytest

from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from manege.types import Outcome, Task
from tests.conftest import TINY_MODEL
from tests.system.kubernetes import images
from tests.system.kubernetes.api import Api
from tests.system.kubernetes.cluster import Cluster, built
from tests.system.kubernetes.conftest import needs
from tests.system.kubernetes.node import PAUSE, Node
from tests.system.kubernetes.running import api_of, controlling, run_config, settle, spec

pytestmark = [pytest.mark.anyio, pytest.mark.full]

IMAGE = "registry.local/agent:1"
FIXED = "def add(a, b):\n    return a + b\n"
AGENT = """
import json, os, socket, urllib.request
assert not os.path.exists(".git"), "the history is here"
try:
    socket.create_connection(("192.0.2.1", 80), 5)
    raise SystemExit("there is a way out")
except OSError:
    pass
question = json.load(open(os.environ["MANEGE_TASK_FILE"]))["input"]["question"] + open("code.py").read()
body = {"model": "m", "messages": [{"role": "user", "content": question}], "max_tokens": 100}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
open("code.py", "w").write(answer["choices"][0]["message"]["content"])
"""
REPOSITORY = [
    ("/agent/agent.py", AGENT.encode()),
    ("/repository/code.py", b"def add(a, b):\n    return a - b\n"),
    ("/repository/tests/check.py", b"import code\nassert code.add(2, 0) == 2\n"),
    ("/repository/.git/HEAD", b"the fix is +"),
]

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
    images.build(archives[1], IMAGE, busybox=busybox, files=REPOSITORY, with_python=True)
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


def says(text):
    """A model that knows one answer."""
    ids = renderer_for(open_folder(str(TINY_MODEL))).encode(text)
    return lambda _prompt: ids


@pytest.mark.parametrize(
    ("engine", "reward"),
    [(says(FIXED), 1.0), (says("def add(a, b):\n    return 2\n"), 0.0)],
    ids=["the bug fixed", "only what the visible test asks"],
    indirect=["engine"],
)
async def test_a_coding_task_from_claim_to_verdict(api, whole, client, gateway, tmp_path, reward):
    """The agent repairs a program by what the model says; the scorer runs the repository's test and a hidden one."""
    cluster, node = whole
    checks = "cd /repository && PYTHONPATH=. python3 tests/check.py && PYTHONPATH=. python3 tests/hidden.py"
    config = run_config(
        ["python3", "/agent/agent.py"],
        ["sh", "-c", f"{checks} && echo 1 || echo 0"],
        scoring={"files": {"tests/hidden.py": "{test}"}, "restore": ["tests/**"]},
        kubernetes={
            "image": IMAGE,
            "workspace": "/repository",
            "gateway_url": node.expose(int(gateway.url.rpartition(":")[2])),
        },
    )
    hidden = {"test": "import code\nassert code.add(2, 3) == 5\n"}
    task = Task(id="t", input={"question": "Repair add."}, hidden=hidden)
    async with controlling(client, tmp_path, api_of(cluster, "default")):
        (rollout,) = await settle(client, config, spec(task=task))
    assert (rollout.outcome, rollout.reward, rollout.message) == (Outcome.OK, reward, None)
    pod = await api.get(f"{PODS}/{rollout.evidence['pod']}")
    states = [each["state"] for each in pod["status"]["initContainerStatuses"] + pod["status"]["containerStatuses"]]
    assert {state["terminated"]["exitCode"] for state in states} == {0}
