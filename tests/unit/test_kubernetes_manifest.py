"""From attempts to manifests, as tables."""

import json

import pytest

from manege.client import Claim
from manege.config import RunConfig
from manege.controller.kubernetes.manifest import build, check, owned
from manege.controller.kubernetes.names import Owner, job_name
from manege.controller.kubernetes.network import network_policy
from manege.errors import HarnessError
from manege.kubernetes_config import KubernetesConfig
from manege.types import Rollout, RolloutSpec, RolloutState, Task

OWNER = Owner(gateway_url="http://10.0.0.5:8400", controller="kubernetes")
GATEWAY = "http://10.0.0.5:8400"


def claim(rollout_id="r1", *, attempt=0, **changes):
    task = Task(id="t1", input={"question": "why $(HOME)?"}, hidden={"answer": "42"})
    spec = RolloutSpec(**({"id": rollout_id, "run": "Run_1", "task": task, "group": "g1"} | changes))
    rollout = Rollout(spec=spec, state=RolloutState.RUNNING, attempt=attempt, created_s=0)
    return Claim(rollout=rollout, agent_key=f"mk-{attempt}-a-{rollout_id}", scorer_key=f"ms-{attempt}-b-{rollout_id}")


def config(*, agent=None, scorer=None, **kubernetes):
    return RunConfig.model_validate(
        {
            "name": "run",
            "tasks": {"train": "tasks.jsonl"},
            "agent": {"run": ["agent", "$(X)"], "env": {"QUESTION": "{question}"}, **(agent or {})},
            "scorer": {"run": ["score"], **(scorer or {})},
            "kubernetes": {"image": "agent:1", **kubernetes},
        }
    )


def made(settings=None, given=None, **changes):
    return build(given or claim(), settings or config(), owner=OWNER, namespace="ns", gateway_url=GATEWAY, **changes)


def pod_of(manifest):
    return manifest.job["spec"]["template"]["spec"]


def containers_of(manifest):
    pod = pod_of(manifest)
    return {each["name"]: each for each in [*pod.get("initContainers", []), *pod["containers"]]}


def env_of(container):
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_a_job_is_tried_once_and_ends_by_itself():
    settings = config(agent={"limits": {"setup_s": 1, "run_s": 10, "score_s": 3, "cleanup_s": 4}}, pending_s=100)
    job = made(settings).job["spec"]
    assert (job["backoffLimit"], job["parallelism"], job["completions"]) == (0, 1, 1)
    assert (job["activeDeadlineSeconds"], job["ttlSecondsAfterFinished"]) == (118, 3600)
    assert job["template"]["spec"]["restartPolicy"] == "Never"


def test_names_are_the_same_each_time_and_those_of_each_attempt_and_gateway_its_own():
    assert job_name(claim()) == job_name(claim())
    other = Claim(rollout=claim().rollout, agent_key="mk-0-other-r1", scorer_key="s")
    names = [job_name(claim()), job_name(claim(attempt=1)), job_name(claim(), part="control"), job_name(other)]
    assert len(set(names)) == 4


@pytest.mark.parametrize("rollout_id", ["r", "A.b_C:d-e", "x" * 200, "-" * 9, "train-0001.7"])
def test_names_and_labels_are_such_as_kubernetes_takes(rollout_id):
    manifest = made(given=claim(rollout_id, attempt=12345))
    assert len(manifest.name) <= 57
    assert manifest.name.replace("-", "").isalnum()
    assert manifest.name == manifest.name.lower()
    for value in manifest.job["metadata"]["labels"].values():
        assert 0 < len(value) <= 63
        assert value[0].isalnum()
        assert value[-1].isalnum()
    assert manifest.job["metadata"]["annotations"]["manege/rollout-id"] == rollout_id


def test_labels_and_annotations_say_whose_job_it_is_also_on_its_pods():
    job = made(given=claim(attempt=2)).job
    for meta in (job["metadata"], job["spec"]["template"]["metadata"]):
        labels = meta["labels"]
        assert OWNER.owns(labels)
        assert (labels["manege/run"], labels["manege/attempt"]) == ("run-1", "2")
        assert meta["annotations"] == {
            "manege/rollout-id": "r1", "manege/run": "Run_1", "manege/task": "t1", "manege/group": "g1",
        }  # fmt: skip
    assert not Owner(gateway_url=GATEWAY, controller="another").owns(job["metadata"]["labels"])
    assert not Owner(gateway_url="http://other:1", controller="kubernetes").owns(job["metadata"]["labels"])


@pytest.mark.parametrize(
    ("changes", "kubernetes", "init", "main"),
    [
        ({}, {}, ["agent"], ["scorer"]),
        ({"scorer": {"reward_from": "agent"}}, {}, [], ["agent"]),
        ({}, {"workspace": "/repo"}, ["prepare", "agent"], ["scorer"]),
        ({"agent": {"setup": ["s"]}}, {}, ["setup", "keep", "agent"], ["scorer"]),
        ({"agent": {"setup": ["s"]}}, {"workspace": "/repo"}, ["prepare", "setup", "keep", "agent"], ["scorer"]),
        ({"scorer": {"restore": ["tests/**"]}}, {}, ["prepare", "agent"], ["scorer"]),
    ],
    ids=["plain", "judges itself", "workspace", "setup", "workspace and setup", "restore"],
)
def test_containers_follow_the_stages_of_a_run(changes, kubernetes, init, main):
    settings = config(**changes, **kubernetes)
    given = claim(reward_from=settings.scorer.reward_from)
    pod = pod_of(made(settings, given))
    assert [each["name"] for each in pod["initContainers"]] == init
    assert [each["name"] for each in pod["containers"]] == main


def test_each_task_may_have_an_image_of_its_own():
    task = Task(id="t", input={"question": "?", "image_name": "repository.1234"})
    manifest = made(config(image="agents/{image_name}:1"), claim(task=task))
    assert {container["image"] for container in containers_of(manifest).values()} == {"agents/repository.1234:1"}
    with pytest.raises(HarnessError, match=r"kubernetes\.image = 'agents/.other.'"):
        made(config(image="agents/{other}"), claim(task=task))


def test_a_control_has_everything_but_the_agent():
    settings = config(agent={"setup": ["s"]}, workspace="/repo")
    manifest = made(settings, control="control")
    assert list(containers_of(manifest)) == ["prepare", "setup", "keep", "scorer"]
    assert (manifest.agent, manifest.scorer) == (None, "scorer")
    assert manifest.name != made(settings).name


def test_keys_are_in_the_secret_alone_and_each_container_gets_its_own():
    manifest = made(config(agent={"setup": ["s"]}, workspace="/repo"))
    assert "mk-0" not in json.dumps(manifest.job)
    assert "ms-0" not in json.dumps(manifest.job)
    for name, container in containers_of(manifest).items():
        env = env_of(container)
        keys = {value["secretKeyRef"]["key"] for value in env.values() if isinstance(value, dict)}
        assert keys == ({"scorer-key"} if name in ("scorer", "setup") else {"agent-key"})
    assert manifest.secret["stringData"]["agent-key"] == "mk-0-a-r1"


def test_what_is_hidden_reaches_setup_and_scorer_alone():
    settings = config(agent={"setup": ["s"]}, scorer={"files": {"tests/hidden.txt": "it is {answer}"}})
    manifest = made(settings)
    assert "42" not in json.dumps(manifest.job["spec"])
    volumes = {each["name"]: each for each in pod_of(manifest)["volumes"]}
    assert volumes["manege-task"]["secret"]["items"] == [{"key": "task.json", "path": "task.json"}]
    assert json.loads(manifest.secret["stringData"]["task.json"]) == {"id": "t1", "input": {"question": "why $(HOME)?"}}
    assert manifest.secret["stringData"]["file-0"] == "it is 42"
    for name, container in containers_of(manifest).items():
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert ("manege-hidden" in mounted) == (name in ("setup", "scorer"))
        assert ("pristine" in mounted) is False


def test_the_agent_never_sees_the_pristine_copy():
    mounts = {
        name: {each["name"]: each.get("readOnly", False) for each in container["volumeMounts"]}
        for name, container in containers_of(made(config(scorer={"restore": ["tests/**"]}))).items()
    }
    assert "pristine" not in mounts["agent"]
    assert (mounts["prepare"]["pristine"], mounts["scorer"]["pristine"]) == (False, True)


def test_an_agent_gets_the_variables_of_local_agents_and_none_of_this_machine():
    env = env_of(containers_of(made())["agent"])
    assert env["OPENAI_BASE_URL"] == f"{GATEWAY}/v1"
    assert env["AGL_OPENAI_BASE_URL"] == f"{GATEWAY}/proxy/rollout/r1/attempt/0/mode/train/openai/v1"
    assert env["AGL_EVENT_URL"] == env["MANEGE_EVENT_URL"] == f"{GATEWAY}/api/rollouts/r1/attempt/0/events"
    assert env["MANEGE_TASK_FILE"] == "/manege/task/task.json"
    assert not env.keys() & {"PATH", "HOME", "TMPDIR", "LANG", "SSL_CERT_DIR"}


def test_kubernetes_replaces_nothing_in_commands_and_values():
    container = containers_of(made())["agent"]
    assert env_of(container)["QUESTION"] == "why $$(HOME)?"
    assert container["command"][-2:] == ["agent", "$$(X)"]


def test_limits_become_resources_and_memory_is_the_agents_own():
    settings = config(
        agent={"limits": {"memory_mb": 512, "cpus": 0.25}},
        requests={"memory": "64Mi"},
        limits={"example.com/gpu": "1"},
        node_selector={"pool": "agents"},
        runtime_class="gvisor",
    )
    manifest = made(settings)
    assert containers_of(manifest)["agent"]["resources"] == {
        "limits": {"memory": "512Mi", "cpu": "250m", "example.com/gpu": "1"}, "requests": {"memory": "64Mi"},
    }  # fmt: skip
    assert manifest.has_memory_limit
    pod = pod_of(manifest)
    assert (pod["nodeSelector"], pod["runtimeClassName"]) == ({"pool": "agents"}, "gvisor")


def test_agents_have_no_way_into_the_cluster():
    manifest = made()
    pod, agent = pod_of(manifest), containers_of(manifest)["agent"]
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    assert agent["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}


def test_a_secret_goes_with_its_job():
    manifest = made()
    secret = owned(manifest.secret, {"metadata": {"name": manifest.name, "uid": "u1"}})
    assert secret["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": manifest.name, "uid": "u1"}
    ]


TEMPLATE = """
apiVersion: batch/v1
kind: Job
metadata: {name: any, labels: {team: a}}
spec:
  backoffLimit: 5
  activeDeadlineSeconds: 77
  template:
    spec:
      restartPolicy: OnFailure
      initContainers: [{name: first, image: i}]
      containers:
        - name: main
          image: {{ input.image | default("i") }}
          env: [{name: AGL_KEY, value: theirs}, {name: OWN, value: {{ rollout.rollout_id | yaml_escape }}}]
        - {name: beside, image: i, env: [{name: URL, value: {{ env.AGL_OPENAI_BASE_URL }}}]}
"""


def test_a_template_keeps_what_is_its_own_and_gets_what_every_job_has():
    settings = config(template=TEMPLATE, image=None)
    manifest = made(settings, claim(reward_from="agent"))
    job, found = manifest.job, containers_of(manifest)
    assert (job["metadata"]["name"], job["metadata"]["namespace"]) == (manifest.name, "ns")
    assert job["metadata"]["labels"]["team"] == "a"
    assert (job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == (0, 77)
    assert pod_of(manifest)["restartPolicy"] == "Never"
    assert (manifest.agent, manifest.scorer, manifest.is_timed) == ("main", None, False)
    assert manifest.has_memory_limit is False
    for container in found.values():
        assert env_of(container)["AGL_KEY"] == {"secretKeyRef": {"name": manifest.name, "key": "agent-key"}}
    assert env_of(found["main"])["OWN"] == "r1"
    assert env_of(found["beside"])["URL"].startswith(f"{GATEWAY}/proxy/rollout/r1")


HEAD = "apiVersion: batch/v1\nkind: Job\nspec: {template: {spec: "


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nothing.here }}", "cannot be rendered"),
        ("{{ ''.__class__.__mro__ }}", "cannot be rendered"),
        ("kind: Pod", "want exactly one document of kind Job"),
        ("kind: Job\n---\nkind: Job", "want exactly one document of kind Job"),
        ("", "want exactly one document of kind Job"),
        ("kind: Job", "without spec.template.spec.containers"),
        (HEAD + "{containers: []}}}", "without containers"),
        (HEAD + "{containers: [{name: a}]}}}", 'no container named "scorer"'),
        (HEAD + "{containers: [{name: agent}, {name: scorer}]}}}", "beside its scorer"),
        (HEAD + "{containers: [{name: scorer}]}}}", "no container for the agent"),
    ],
)
def test_a_template_that_is_no_job_of_an_attempt_is_refused(template, message):
    with pytest.raises(HarnessError, match=message):
        made(config(template=template))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": None}, "set kubernetes.image"),
        ({"agent": {"run": "module:function"}}, r"agent.run is 'module:function'"),
        ({"agent": {"run": None, "harness": "codex"}}, "agent.run is a harness"),
        ({"agent": {"setup": "module:function"}}, "agent.setup"),
        ({"scorer": {"run": "module:function"}}, "scorer.run"),
        ({"agent": {"workspace": {"source": "folder"}}}, "kubernetes.workspace"),
        ({"scorer": {"network": True}}, "kubernetes.network_policy = false"),
    ],
)
def test_a_run_that_cannot_be_jobs_is_refused_with_what_to_do(changes, message):
    with pytest.raises(HarnessError, match=message):
        check(config(**changes))


def test_an_agent_that_judges_itself_needs_no_scorer_command():
    check(config(scorer={"run": "module:function", "reward_from": "agent"}))


LABELS = {"app": "gateway"}


@pytest.mark.parametrize(
    ("settings", "url", "egress"),
    [
        ({}, GATEWAY, [{"to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}], "ports": [{"protocol": "TCP", "port": 8400}]}]),
        (
            {},
            "https://[fd00::1]",
            [{"to": [{"ipBlock": {"cidr": "fd00::1/128"}}], "ports": [{"protocol": "TCP", "port": 443}]}],
        ),
        (
            {"gateway_pods": LABELS, "dns": True},
            "http://gateway.ns:8400",
            [
                {"to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": LABELS}}]},
                {
                    "to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
                    "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
                },
            ],
        ),
    ],
    ids=["address", "IPv6", "name"],
)
def test_a_policy_lets_out_what_is_for_the_gateway_and_nothing_else(settings, url, egress):
    policy = network_policy(KubernetesConfig(**settings), url)
    assert policy["spec"]["egress"] == egress
    assert (policy["spec"]["policyTypes"], policy["spec"]["ingress"]) == (["Ingress", "Egress"], [])


@pytest.mark.parametrize("settings", [{}, {"dns": True}, {"gateway_pods": LABELS}])
def test_a_gateway_by_name_needs_dns_and_labels(settings):
    with pytest.raises(HarnessError, match="is a name"):
        network_policy(KubernetesConfig(**settings), "http://gateway:8400")


def test_pods_carry_the_label_that_their_policy_selects():
    manifest = made()
    wanted = manifest.policy["spec"]["podSelector"]["matchLabels"]
    assert wanted.items() <= manifest.job["spec"]["template"]["metadata"]["labels"].items()
    assert made(config(dns=True)).policy["metadata"]["name"] != manifest.policy["metadata"]["name"]
    assert made(config(network_policy=False)).policy is None
