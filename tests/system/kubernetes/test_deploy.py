"""What deploy/ holds is accepted by a real API as it is written, and its rights are enough, and no more than that."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from manege.cli.main import make_parser
from manege.controller.kubernetes.doctor import RIGHTS, examine
from manege.types import Outcome
from tests.system.kubernetes.running import api_of, controlling, run_config, settle, spec

DEPLOY = Path(__file__).parents[3] / "deploy"
OVERLAYS = ("small", "whole")
AGENTS = "manege-agents"
_PATHS = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Namespace": "/api/v1/namespaces",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ServiceMonitor": "/apis/monitoring.coreos.com/v1/namespaces/{}/servicemonitors",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
}


def built(overlay):
    """The objects that `kubectl apply -k` would send."""
    return list(yaml.safe_load_all(kubectl("kustomize", DEPLOY / "overlays" / overlay)))


def named(overlay, kind, name):
    return next(each for each in built(overlay) if (each["kind"], each["metadata"]["name"]) == (kind, name))


def lost(sent, kept, path=""):
    """What of the one is not in the other: the API drops fields that it does not know."""
    if isinstance(sent, dict):
        for name, value in sent.items():
            yield from lost(value, kept.get(name) if isinstance(kept, dict) else None, f"{path}.{name}")
    elif isinstance(sent, list):
        kept = kept if isinstance(kept, list) else []
        for number, value in enumerate(sent):
            yield from lost(value, kept[number] if number < len(kept) else None, f"{path}[{number}]")
    elif sent != kept:
        yield path, sent, kept


def kubectl(*words):
    """What it says, with the program of the tests' own environment."""
    command = [Path(sys.executable).with_name("kubectl"), *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture(scope="module")
def monitors(cluster):
    """The kind that the Prometheus operator brings, as far as it matters."""
    names = {"plural": "servicemonitors", "singular": "servicemonitor", "kind": "ServiceMonitor"}
    anything = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": anything}
    group = {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]}
    path, name = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "servicemonitors.monitoring.coreos.com"
    cluster.request("POST", path, {"metadata": {"name": name}, "spec": group}).raise_for_status()
    kubectl("--kubeconfig", cluster.kubeconfig(), "wait", "--for=condition=Established", f"crd/{name}")
    yield
    cluster.request("DELETE", f"{path}/{name}").raise_for_status()


@pytest.fixture(scope="module")
def deployed(cluster, monitors):
    """All of it: pairs of each object as it was sent and as the API has it."""
    pairs = []
    for thing in built("whole"):
        path = _PATHS[thing["kind"]].format(thing["metadata"].get("namespace"))
        answer = cluster.request("POST", path, thing)
        assert answer.status_code == 201, answer.text
        pairs.append((thing, answer.json()))
    yield pairs
    for thing, _ in pairs:
        if thing["kind"] == "Namespace":
            cluster.request("DELETE", f"/api/v1/namespaces/{thing['metadata']['name']}").raise_for_status()


def test_the_api_takes_every_object_with_all_its_fields(deployed):
    assert {thing["kind"] for thing, _ in deployed} == _PATHS.keys()
    assert [entry for sent, kept in deployed for entry in lost(sent, kept)] == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_container_is_confined(overlay):
    for thing in built(overlay):
        if thing["kind"] != "StatefulSet":
            continue
        pod = thing["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is (thing["metadata"]["name"] == "manege-controller")
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize("name", ["manege-gateway", "manege-controller"])
def test_our_programs_know_their_arguments(name):
    container = named("whole", "StatefulSet", name)["spec"]["template"]["spec"]["containers"][0]
    arguments = make_parser().parse_args([re.sub(r"\$\(\w+\)", "x", word) for word in container["args"]])
    assert f"manege-{arguments.verb}" == name
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert used <= {entry["name"] for entry in container["env"]}


def test_the_role_grants_what_a_controller_does_and_nothing_else():
    rules = named("small", "Role", "manege-controller")["rules"]
    granted = {(rule["apiGroups"][0], rule["resources"][0]): tuple(rule["verbs"]) for rule in rules}
    assert granted == RIGHTS
    assert all(len(rule["apiGroups"]) == len(rule["resources"]) == 1 for rule in rules)


@pytest.mark.anyio
async def test_with_the_controllers_account_attempts_are_carried_out(
    deployed, cluster, client, gateway, kubelet, tmp_path
):
    kubelet.namespaces.add(AGENTS)
    token = cluster.account_token("manege", "manege-controller")
    api = api_of(cluster, AGENTS, token=token)
    found = [(finding.ok, finding.text) async for finding in examine(api, AGENTS)]
    await api.aclose()
    assert [ok for ok, _ in found] == [True, True]
    async with controlling(client, tmp_path, api_of(cluster, AGENTS, token=token)):
        (rollout,) = await settle(client, run_config(), spec())
    assert (rollout.outcome, rollout.reward, rollout.message) == (Outcome.OK, 1.0, None)
    for path in ("secrets", "pods/x/log", "configmaps"):
        assert cluster.request("GET", f"/api/v1/namespaces/{AGENTS}/{path}", token=token).status_code == 403
