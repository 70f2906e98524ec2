"""Attempts as Jobs against a real Kubernetes API, on a node that really runs their containers."""

import asyncio
import json
import subprocess

import pytest

from manege.errors import ConflictError
from manege.store.base import Ending
from manege.types import Outcome
from tests.system.kubernetes.running import (
    api_of,
    controlling,
    jobs,
    python,
    run_config,
    settle,
    spec,
    under_way,
    waits_for,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def carry_out(client, cluster, namespace, kubelet, tmp_path):
    """Run one rollout through a controller of its own."""

    async def run(config, **changes):
        async with controlling(client, tmp_path, api_of(cluster, namespace)):
            (rollout,) = await settle(client, config, spec(**changes))
        return rollout

    return run


async def test_an_agent_runs_as_a_job_and_is_scored_on_what_it_left(carry_out, client, kube, namespace):
    rollout = await carry_out(run_config())
    assert (rollout.outcome, rollout.reward, rollout.message) == (Outcome.OK, 1.0, None)
    evidence = rollout.evidence
    assert (evidence["num_calls"], evidence["namespace"], evidence["cluster"]) == (1, namespace, "cluster")
    job = (await jobs(kube, namespace))[evidence["job"]]
    assert job["metadata"]["annotations"]["manege/rollout-id"] == rollout.spec.id
    assert job["spec"]["backoffLimit"] == 0
    (pod,) = await client.events(rollout.spec.id, "kubernetes.pod")
    assert pod.data["pod"] == evidence["pod"]
    secret = await kube.get(f"/api/v1/namespaces/{namespace}/secrets/{evidence['job']}")
    assert [owner["uid"] for owner in secret["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]


@pytest.mark.parametrize(
    ("agent", "limits", "outcome", "reward", "message"),
    [
        (python("ask()"), {}, Outcome.OK, 0.0, None),
        (python("ask(); sys.exit(3)"), {}, Outcome.OK, 0.0, "the agent ended with exit code 1"),
        (["false"], {}, Outcome.AGENT_ERROR, 0.0, "crashed before its first model call"),
        (python("ask()\nwhile True: pass"), {"run_s": 2}, Outcome.AGENT_TIMEOUT, 0.0, "did not end within 2 s"),
        (["/no/such/program"], {}, Outcome.INFRA_ERROR, None, "the image cannot run the agent's command"),
    ],
    ids=["nothing done", "crashed after a call", "crashed at once", "hangs", "no such program"],
)
async def test_an_agents_end_is_judged_as_on_this_machine(carry_out, agent, limits, outcome, reward, message):
    rollout = await carry_out(run_config(agent, limits=limits))
    assert (rollout.outcome, rollout.reward) == (outcome, reward)
    assert rollout.message is message or message in rollout.message


async def test_a_scorer_that_only_this_workspace_stops_gives_nothing(carry_out):
    hangs_on_it = ["sh", "-c", "if [ -f /workspace/answer.txt ]; then sleep 60; fi; echo 0"]
    rollout = await carry_out(run_config(scorer=hangs_on_it, limits={"score_s": 2}))
    assert (rollout.outcome, rollout.reward) == (Outcome.AGENT_ERROR, 0.0)
    assert "did not end within 2 s" in rollout.message
    assert "not so on a pristine workspace" in rollout.message


async def test_a_scorer_that_fails_on_any_workspace_says_nothing_about_the_agent(carry_out):
    rollout = await carry_out(run_config(scorer=["sh", "-c", "echo lovely"]), max_attempts=3)
    assert (rollout.outcome, rollout.reward, rollout.attempt) == (Outcome.INFRA_ERROR, None, 0)
    assert "the scorer's verdict is 'lovely'" in rollout.message


async def test_an_agent_may_judge_itself_if_the_run_says_so(carry_out):
    post = "ask(); post(os.environ['AGL_EVENT_URL'], os.environ['AGL_KEY'], %s)"
    event = {"event_type": "reward", "data": {"value": 0.75}}
    config = run_config(python(post % json.dumps(event)), scoring={"reward_from": "agent"})
    rollout = await carry_out(config, reward_from="agent")
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 0.75)


@pytest.fixture
def repository(tmp_path):
    """Of an image: code with a bug, its test, and a history that tells the fix."""
    folder = tmp_path / "repository"
    (folder / "tests").mkdir(parents=True)
    (folder / "code.sh").write_text("echo 3\n")
    (folder / "tests" / "check.sh").write_text(f'test "$(sh {folder}/code.sh)" = 4\n')
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "the fix is 4"]):
        subprocess.run([*git, *command], check=True)
    return folder


def scored_by_tests(repository, agent):
    """The scorer runs the repository's own test and a hidden one."""
    run = f"cd {repository} && sh tests/check.sh && sh tests/hidden.sh && echo 1 || echo 0"
    return run_config(
        python("ask()\n" + agent),
        ["sh", "-c", run],
        scoring={"files": {"tests/hidden.sh": "echo {answer} > /tmp/seen\n"}, "restore": ["tests/**"]},
        kubernetes={"workspace": str(repository)},
    )


async def test_a_workspace_out_of_the_image_has_no_history_and_is_scored_with_its_own_tests(carry_out, repository):
    agent = "assert not os.path.exists('.git'), 'history'\nopen('code.sh', 'w').write('echo 4')"
    rollout = await carry_out(scored_by_tests(repository, agent))
    assert (rollout.outcome, rollout.reward, rollout.message) == (Outcome.OK, 1.0, None)


@pytest.mark.parametrize(
    "attack",
    [
        "open('tests/check.sh', 'w').write('true')",
        "import shutil; shutil.rmtree('tests'); os.symlink('/usr/bin', 'tests')",
        "os.remove('tests/check.sh'); os.symlink('/bin/true', 'tests/check.sh')",
        "os.rename('tests', 'x'); open('x/check.sh', 'w').write('true'); os.symlink('x', 'tests')",
        "open('/dev/termination-log', 'w').write('1'); os.mkdir('tests/hidden.sh')",
    ],
    ids=["edits a test", "links the folder away", "links a test", "brings its own folder", "writes its own end"],
)
async def test_what_an_agent_does_to_the_tests_is_undone(carry_out, repository, attack):
    rollout = await carry_out(scored_by_tests(repository, attack))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 0.0)


async def test_hidden_fields_and_keys_of_others_are_in_no_container_of_the_agent(carry_out, client, tmp_path):
    look = """
import subprocess
seen = dict(os.environ)
seen["files"] = subprocess.run("cat /manege/*/*", shell=True, capture_output=True, text=True).stdout
post(os.environ["MANEGE_EVENT_URL"], os.environ["AGL_KEY"], {"event_type": "seen", "data": seen})
"""
    rollout = await carry_out(run_config(python("ask()" + look)))
    (event,) = await client.events(rollout.spec.id, "seen")
    seen = event.data
    assert seen["QUESTION"] == "why?"
    assert json.loads(seen["files"]) == {"id": "t", "input": {"question": "why?"}}
    assert seen["OPENAI_API_KEY"] == seen["AGL_KEY"]
    assert "MANEGE_SCORER_KEY" not in seen
    assert "secret" not in json.dumps(seen)


TEMPLATE = """
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ job_name }}
spec:
  template:
    spec:
      initContainers:
        - name: early
          image: local
          command: ["sh", "-c", "test -n \\"$AGL_KEY\\""]
      containers:
        - name: agent
          image: local
          command: COMMAND
          env:
            - name: QUESTION
              value: {{ input.question | yaml_escape }}
            - name: AGL_KEY
              value: not this one
        - name: beside
          image: local
          command: ["sh", "-c", "test -n \\"$AGL_OPENAI_BASE_URL\\" && sleep 600"]
"""


async def test_a_template_of_agent_lightning_runs_and_ends_with_its_agent(carry_out, kube, namespace):
    agent = """
body = {"messages": [{"role": "user", "content": os.environ["QUESTION"]}], "max_tokens": 4}
post(os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions", os.environ["AGL_KEY"], body)
post(os.environ["AGL_EVENT_URL"], os.environ["AGL_KEY"], {"event_type": "reward", "data": {"value": 0.5}})
"""
    template = TEMPLATE.replace("COMMAND", "{% raw %}" + json.dumps(python(agent)) + "{% endraw %}")
    config = run_config(kubernetes={"template": template}, scoring={"reward_from": "agent"})
    rollout = await carry_out(config, reward_from="agent")
    assert (rollout.outcome, rollout.reward, rollout.message) == (Outcome.OK, 0.5, None)
    # The container beside it would have run for ten minutes.
    await kube.until(f"/api/v1/namespaces/{namespace}/pods", lambda objects: not objects)
    assert await jobs(kube, namespace) == {}


async def test_only_the_gateway_may_be_reached_where_a_cluster_enforces_it(carry_out, kube, namespace, gateway):
    await carry_out(run_config())
    listed = await kube.get(f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies")
    (policy,) = listed["items"]
    port = int(gateway.url.rpartition(":")[2])
    peer = {"to": [{"ipBlock": {"cidr": "127.0.0.1/32"}}], "ports": [{"protocol": "TCP", "port": port}]}
    assert policy["spec"]["egress"] == [peer]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    (pod,) = (await kube.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


async def test_a_cancelled_rollouts_agent_dies_and_so_does_its_key(client, cluster, namespace, kubelet, kube, tmp_path):
    config = run_config(waits_for(tmp_path / "never"))
    await client.put_run("run", config.model_dump(mode="json"))
    async with controlling(client, tmp_path, api_of(cluster, namespace)):
        await client.create_rollouts([spec("r")])
        await under_way(client, kube, namespace, "r")
        began_s = asyncio.get_running_loop().time()
        assert (await client.cancel("r")).outcome is Outcome.CANCELLED
        await kube.until(f"/api/v1/namespaces/{namespace}/pods", lambda objects: not objects)
        assert asyncio.get_running_loop().time() - began_s < 10
        with pytest.raises(ConflictError):
            await client.finish("r", 0, Ending(outcome=Outcome.OK))
    assert await jobs(kube, namespace) == {}


async def test_attempts_are_spread_over_clusters(client, cluster, namespace, kubelet, kube, tmp_path):
    second = f"{namespace}-b"
    await kube.create("/api/v1/namespaces", {"metadata": {"name": second}})
    kubelet.namespaces.add(second)
    specs = [spec(f"r{number}") for number in range(8)]
    async with controlling(client, tmp_path, api_of(cluster, namespace, name="a"), api_of(cluster, second, name="b")):
        ends = await settle(client, run_config(), *specs)
    assert [rollout.reward for rollout in ends] == [1.0] * 8
    assert {rollout.evidence["cluster"] for rollout in ends} == {"a", "b"}
    assert (len(await jobs(kube, namespace)), len(await jobs(kube, second))) == tuple(
        sum(rollout.evidence["cluster"] == name for rollout in ends) for name in "ab"
    )


async def test_a_run_for_a_namespace_that_is_not_served_is_refused_with_the_reason(carry_out):
    rollout = await carry_out(run_config(kubernetes={"namespace": "elsewhere"}))
    assert rollout.outcome is Outcome.INFRA_ERROR
    assert "start it with --namespace elsewhere" in rollout.message


async def test_an_agent_of_a_template_ends_at_its_jobs_deadline(carry_out):
    template = TEMPLATE.replace("COMMAND", "{% raw %}" + json.dumps(python("ask()\nwhile True: pass")) + "{% endraw %}")
    template = template.replace("spec:\n  template", "spec:\n  activeDeadlineSeconds: 3\n  template", 1)
    config = run_config(kubernetes={"template": template}, scoring={"reward_from": "agent"})
    rollout = await carry_out(config, reward_from="agent")
    assert (rollout.outcome, rollout.reward) == (Outcome.AGENT_TIMEOUT, 0.0)
    assert "activeDeadlineSeconds" in rollout.message
