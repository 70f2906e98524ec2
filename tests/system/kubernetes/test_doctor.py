"""`manege doctor --runner kubernetes` against a real API: rights, quota, and a probe that really connects."""

import asyncio
import sys
from pathlib import Path

import pytest

from manege.controller.kubernetes.doctor import RIGHTS, examine
from tests.system.kubernetes.cluster import RESTRICTED
from tests.system.kubernetes.running import api_of, run_config

pytestmark = pytest.mark.anyio


@pytest.fixture
async def report(cluster, namespace):
    """What is found, as pairs of verdict and text."""

    async def look(config=None, **options):
        api = api_of(cluster, namespace, token=options.pop("token", "admin-token"))
        try:
            return [(found.ok, found.text) async for found in examine(api, namespace, config=config, **options)]
        finally:
            await api.aclose()

    return look


def about(found, word):
    return [(ok, text) for ok, text in found if text.startswith(word)]


async def test_each_right_that_is_missing_is_named(report):
    found = await report(token=RESTRICTED)
    named = [text.partition("may not ")[2].partition(";")[0] for ok, text in found if ok is False]
    assert named == [
        f"{verb} {resource}{group and '.' + group}" for (group, resource), verbs in RIGHTS.items() for verb in verbs
    ]


async def test_all_rights_are_said_in_a_line(report, namespace):
    assert (True, f"cluster cluster, namespace {namespace}: all rights of a controller") in await report()


async def test_a_wrong_token_is_said(report):
    [(ok, text)] = await report(token="wrong")
    assert ok is False
    assert "401" in text


async def test_a_pod_reaches_the_gateway_and_shows_that_nothing_holds_it_back(
    report, gateway, kubelet, kube, namespace
):
    """Nothing here enforces network policies, and that is what the probe sees."""
    found = await report(run_config(), gateway_url=gateway.url)
    assert about(found, "probe") == [(True, f"probe: a pod reaches the gateway at {gateway.url}")]
    [(ok, text)] = about(found, "policy")
    assert ok is False
    assert "not enforced" in text
    assert (await kube.get(f"/apis/batch/v1/namespaces/{namespace}/jobs"))["items"] == []


async def test_a_gateway_that_pods_do_not_reach_is_said(report, kubelet):
    found = await report(run_config(), gateway_url="http://127.0.0.1:1")
    assert about(found, "probe") == [(False, "probe: a pod does not reach the gateway at http://127.0.0.1:1")]


async def test_an_image_that_cannot_be_pulled_is_said(report, gateway, kubelet):
    kubelet.unpullable["local"] = "InvalidImageName"
    [(ok, text)] = about(await report(run_config(), gateway_url=gateway.url), "probe")
    assert ok is False
    assert "InvalidImageName" in text


async def test_a_policy_that_is_switched_off_is_said(report, gateway, kubelet):
    config = run_config(kubernetes={"network_policy": False})
    [(ok, text)] = about(await report(config, gateway_url=gateway.url), "policy")
    assert ok is None
    assert "network_policy is false" in text


async def test_a_quota_without_room_is_said(report, gateway, kubelet, kube, namespace):
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"limits.memory": "64Mi", "pods": "10"}}}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    await kube.create(path, quota)
    await kube.until(path, lambda found: "used" in found["small"]["status"])
    kubelet.unpullable["local"] = "InvalidImageName"
    found = await report(run_config(), gateway_url=gateway.url)
    [(ok, text)] = about(found, "quota")
    assert (ok, text.startswith("quota: ResourceQuota small: limits.memory is used up (0 of 64Mi")) == (False, True)


async def test_the_command_prints_a_line_for_each(cluster, namespace):
    program = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("manege"), "doctor", "--runner", "kubernetes", "--namespace", namespace,
        env={"KUBECONFIG": str(cluster.kubeconfig(token=RESTRICTED, name="restricted")), "PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await program.communicate()
    lines = out.decode().splitlines()
    assert program.returncode == 1
    assert [line.split()[0] for line in lines] == ["ok", *["missing"] * sum(map(len, RIGHTS.values()))]
