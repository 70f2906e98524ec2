"""Controllers that stop, share the work and come back: no agent is blamed, and nothing is done twice in vain."""

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


@pytest.fixture
def begin(client, kube, cluster, namespace, kubelet, tmp_path):
    """Start rollouts with one controller, and stop it while their agents run; returns their pods."""

    async def begin(config, *specs):
        await client.put_run("run", config.model_dump(mode="json"))
        async with controlling(client, tmp_path, api_of(cluster, namespace)):
            await client.create_rollouts(list(specs))
            return [await under_way(client, kube, namespace, each.id) for each in specs]

    return begin


@pytest.fixture
def come_back(client, cluster, namespace, tmp_path):
    """A controller of the same name."""
    return lambda **changes: controlling(client, tmp_path, api_of(cluster, namespace), **changes)


def over(objects):
    return bool(objects) and all(entry["status"].get("conditions") for entry in objects.values())


async def test_running_jobs_are_adopted(begin, come_back, client, kube, namespace, tmp_path):
    config = run_config(waits_for(tmp_path / "go", "open('answer.txt', 'w').write('done')"))
    specs = [spec(f"r{number}", max_attempts=3) for number in range(4)]
    pods = await begin(config, *specs)
    async with come_back():
        (tmp_path / "go").touch()
        ends = await ended(client, *[each.id for each in specs])
    assert [(end.outcome, end.reward, end.attempt) for end in ends] == [(Outcome.OK, 1.0, 0)] * 4
    assert [end.evidence["pod"] for end in ends] == pods
    assert len(await jobs(kube, namespace)) == 4


async def test_a_job_that_ended_meanwhile_is_settled(begin, come_back, client, kube, namespace, tmp_path):
    await begin(run_config(waits_for(tmp_path / "go", "open('answer.txt', 'w').write('done')")), spec("r"))
    (tmp_path / "go").touch()
    await kube.until(f"/apis/batch/v1/namespaces/{namespace}/jobs", over)
    async with come_back():
        (end,) = await ended(client, "r")
    assert (end.outcome, end.reward, end.attempt) == (Outcome.OK, 1.0, 0)


SCORES_BY_POST = python("""
data = {"event_type": "reward", "data": {"value": 0.25}}
post(os.environ["MANEGE_EVENT_URL"], os.environ["MANEGE_SCORER_KEY"], data)
print(0.25)
""")


async def test_a_job_whose_pod_is_gone_too_is_settled_by_what_its_scorer_posted(
    begin, come_back, client, kube, namespace, tmp_path
):
    await begin(run_config(waits_for(tmp_path / "go"), SCORES_BY_POST), spec("r"))
    (tmp_path / "go").touch()
    await kube.until(f"/apis/batch/v1/namespaces/{namespace}/jobs", over)
    for name in await kube.until(f"/api/v1/namespaces/{namespace}/pods", bool):
        await kube.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")
    await kube.until(f"/api/v1/namespaces/{namespace}/pods", lambda objects: not objects)
    async with come_back():
        (end,) = await ended(client, "r")
    assert (end.outcome, end.reward, end.attempt) == (Outcome.OK, 0.25, 0)


async def test_a_job_that_is_gone_altogether_is_tried_again(begin, come_back, client, kube, namespace, tmp_path):
    config = run_config(waits_for(tmp_path / "go", "open('answer.txt', 'w').write('done')"))
    await begin(config, spec("r", max_attempts=2))
    for name in await jobs(kube, namespace):
        await kube.delete(f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}")
    await kube.until(f"/api/v1/namespaces/{namespace}/pods", lambda objects: not objects)
    (tmp_path / "go").touch()
    async with come_back():
        (end,) = await ended(client, "r")
    assert (end.outcome, end.reward, end.attempt) == (Outcome.OK, 1.0, 1)


async def test_a_second_pod_that_started_meanwhile_is_not_taken_for_the_first(
    begin, come_back, client, kube, namespace, tmp_path
):
    config = run_config(waits_for(tmp_path / "go", "open('answer.txt', 'w').write('done')"))
    (pod,) = await begin(config, spec("r", max_attempts=2))
    await kube.delete(f"/api/v1/namespaces/{namespace}/pods/{pod}", gracePeriodSeconds=0)
    await kube.until(f"/api/v1/namespaces/{namespace}/pods", lambda objects: objects and pod not in objects)
    (tmp_path / "go").touch()
    await kube.until(f"/apis/batch/v1/namespaces/{namespace}/jobs", over)
    async with come_back():
        (end,) = await ended(client, "r")
    assert (end.outcome, end.reward, end.attempt) == (Outcome.OK, 1.0, 1)


async def test_what_was_cancelled_meanwhile_is_removed(begin, come_back, client, kube, namespace, tmp_path):
    await begin(run_config(waits_for(tmp_path / "never")), spec("r"))
    await client.cancel("r")
    async with come_back():
        await kube.until(f"/api/v1/namespaces/{namespace}/pods", lambda objects: not objects)
        await kube.until(f"/apis/batch/v1/namespaces/{namespace}/jobs", lambda objects: not objects)


async def test_two_controllers_share_the_work(client, cluster, namespace, kubelet, kube, tmp_path):
    specs = [spec(f"r{number}") for number in range(12)]
    async with (
        controlling(client, tmp_path, api_of(cluster, namespace), name="one", slots=3),
        controlling(client, tmp_path, api_of(cluster, namespace), name="two", slots=3),
    ):
        ends = await settle(client, run_config(), *specs)
    assert [(end.outcome, end.reward, end.attempt) for end in ends] == [(Outcome.OK, 1.0, 0)] * 12
    owners = [job["metadata"]["labels"]["manege/controller"] for job in (await jobs(kube, namespace)).values()]
    assert len(owners) == 12
    assert len(set(owners)) == 2


async def test_another_controller_takes_over_what_a_dead_one_had_and_removes_its_job(
    client, kube, cluster, namespace, kubelet, tmp_path
):
    config = run_config(waits_for(tmp_path / "go", "open('answer.txt', 'w').write('done')"))
    await client.put_run("run", config.model_dump(mode="json"))
    async with controlling(client, tmp_path, api_of(cluster, namespace), name="one", lease_s=1):
        await client.create_rollouts([spec("r", max_attempts=2)])
        pod = await under_way(client, kube, namespace, "r")
    async with controlling(client, tmp_path, api_of(cluster, namespace), name="two"):
        await kube.until(f"/api/v1/namespaces/{namespace}/pods", lambda objects: objects and pod not in objects)
        (tmp_path / "go").touch()
        (end,) = await ended(client, "r")
    assert (end.outcome, end.reward, end.attempt) == (Outcome.OK, 1.0, 1)
    assert len(await jobs(kube, namespace)) == 1


async def test_many_jobs_end_well(client, cluster, namespace, kubelet, tmp_path):
    specs = [spec(f"r{number}") for number in range(40)]
    async with controlling(client, tmp_path, api_of(cluster, namespace), slots=40):
        async with asyncio.timeout(120):
            ends = await settle(client, run_config(python("ask()"), ["echo", "0.5"]), *specs)
    assert [(end.outcome, end.reward, end.attempt) for end in ends] == [(Outcome.OK, 0.5, 0)] * 40
