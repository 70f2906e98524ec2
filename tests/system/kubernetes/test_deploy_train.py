"""The overlay `train`: what a real API knows is accepted as it is written, and the rest is as its programs want it.

KubeRay is not here: the fields of its RayJob are held against those of its Go types (ray-operator/apis/ray/v1, v1.4).
"""

import shlex
from pathlib import Path

from manege.backend_config import BackendConfig
from manege.cli.main import make_parser
from manege.config import ModelConfig
from manege.engine.commands import server_command
from tests.system.kubernetes.test_deploy import built, lost, named

PATHS = {
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Service": "/api/v1/namespaces/{}/services",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
}
JOB = {"entrypoint", "rayClusterSpec", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"}
CLUSTER = {"headGroupSpec", "rayVersion", "workerGroupSpecs"}
GROUP = {"rayStartParams", "template"}
WORKERS = GROUP | {"groupName", "maxReplicas", "minReplicas", "replicas"}


def ray_job():
    return named("train", "RayJob", "manege-train")["spec"]


def templates():
    cluster = ray_job()["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


def pod_of(template, number):
    """A container's name is enough for KubeRay to add what starts Ray."""
    metadata = {**template["metadata"], "name": f"manege-train-{number}", "namespace": "manege"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def test_the_api_takes_every_object_with_all_its_fields(cluster, namespace):
    things = [
        thing for thing in built("train") if thing["kind"] in PATHS and thing["metadata"]["namespace"] == "manege"
    ]
    things += [pod_of(template, number) for number, template in enumerate(templates())]
    for thing in things:
        thing["metadata"]["namespace"] = namespace
        path = PATHS[thing["kind"]].format(namespace) + "?dryRun=All"
        answer = cluster.request("POST", path, thing)
        assert answer.status_code == 201, (thing["metadata"]["name"], answer.text)
        assert list(lost(thing, answer.json())) == []


def test_a_ray_job_has_fields_that_kuberay_knows():
    spec = ray_job()
    assert spec.keys() == JOB
    assert spec["rayClusterSpec"].keys() == CLUSTER
    assert spec["rayClusterSpec"]["headGroupSpec"].keys() == GROUP
    assert all(group.keys() == WORKERS for group in spec["rayClusterSpec"]["workerGroupSpecs"])


def test_the_trainer_is_started_with_arguments_that_it_knows():
    program, *words = shlex.split(ray_job()["entrypoint"])
    arguments, overrides = make_parser().parse_known_args(words)
    assert (program, arguments.verb) == ("manege", "train")
    assert {word.partition("=")[0] for word in overrides} == {"folder", "model.path", "backend.ray_address"}


def test_engines_are_started_as_a_run_would_start_them():
    [container] = named("train", "StatefulSet", "manege-vllm")["spec"]["template"]["spec"]["containers"]
    said = [word for flag in container["args"] for word in flag.split("=", 1)]
    backend, model = BackendConfig.model_validate({"engines": {"count": 1}}), ModelConfig()
    ours = list(server_command(backend, model, Path("/shared/model"), port=8000, package="vllm"))
    assert container["command"][1:] == ours[1:3]
    assert said == [word if word != "127.0.0.1" else "0.0.0.0" for word in ours[3:]]


def test_the_gateway_knows_each_engine():
    gateway = named("train", "StatefulSet", "manege-gateway")["spec"]["template"]["spec"]["containers"][0]
    engines = named("train", "StatefulSet", "manege-vllm")["spec"]["replicas"]
    assert sum(word.startswith("--engine=") for word in gateway["args"]) == engines
