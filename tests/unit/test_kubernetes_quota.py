"""Which quotas and limit ranges refuse an attempt's pod."""

import pytest

from manege.controller.kubernetes.quota import refusals


def container(limits=None, requests=None):
    return {"name": "c", "resources": {"limits": limits or {}, "requests": requests or {}}}


def quota(hard, used=None, **spec):
    return {"metadata": {"name": "q"}, "spec": {"hard": hard, **spec}, "status": {"used": used or {}}}


def limit_range(**rule):
    return {"spec": {"limits": [{"type": "Container", **rule}]}}


AGENT = {"initContainers": [container({"memory": "1Gi", "cpu": "2"})], "containers": [container({"memory": "512Mi"})]}
TWO = {"containers": [container({"memory": "1Gi"}), container({"memory": "1Gi"})]}


@pytest.mark.parametrize(
    ("pod", "quotas", "ranges", "said"),
    [
        (AGENT, [], [], []),
        (AGENT, [quota({"limits.memory": "1Gi"})], [], []),
        (AGENT, [quota({"limits.memory": "1Gi"}, {"limits.memory": "1Mi"})], [], ["limits.memory is used up"]),
        (TWO, [quota({"memory": "1536Mi"})], [], ["memory is used up"]),
        (TWO, [quota({"requests.memory": "2Gi"})], [], []),
        (AGENT, [quota({"pods": "3"}, {"pods": "3"})], [], ["pods is used up (3 of 3, an attempt needs 1)"]),
        (AGENT, [quota({"count/jobs.batch": "3"}, {"count/jobs.batch": "2"})], [], []),
        (AGENT, [quota({"limits.cpu": "8"})], [], ["every pod must say its limits.cpu"]),
        (AGENT, [quota({"limits.cpu": "8"})], [limit_range(default={"cpu": "500m"})], []),
        (AGENT, [quota({"limits.cpu": "1"})], [limit_range(default={"cpu": "500m"})], ["limits.cpu is used up"]),
        (AGENT, [quota({"pods": "0"}, scopes=["Terminating"])], [], []),
        (AGENT, [], [limit_range(max={"memory": "1000Mi"})], ["max of limits.memory is 1000Mi"]),
        (AGENT, [], [limit_range(min={"memory": "600Mi"})], ["min of requests.memory is 600Mi"]),
        (AGENT, [], [limit_range(max={"memory": "1Gi"}, min={"memory": "512Mi"})], []),
        (AGENT, [quota({"persistentvolumeclaims": "0"})], [], []),
    ],
)  # fmt: skip
def test_what_would_refuse_a_pod(pod, quotas, ranges, said):
    found = list(refusals(pod, quotas, ranges))
    assert len(found) == len(said)
    for line, words in zip(found, said, strict=True):
        assert words in line
