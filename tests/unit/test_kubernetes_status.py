"""What the typed status of Jobs and pods says about an attempt, as tables."""

import json

import pytest

from manege.config import LimitsConfig
from manege.controller.kubernetes.judging import judge_agent, read_verdict
from manege.controller.kubernetes.manifest import Manifest
from manege.controller.kubernetes.status import ContainerEnd, PodView, Seen, look
from manege.types import Outcome

LIMITS = LimitsConfig(run_s=10, score_s=5)


def job(*, failed=None, complete=False, deleted=False, deadline_s=None):
    conditions = [{"type": "Failed", "status": "True", "reason": failed}] if failed else []
    conditions += [{"type": "Complete", "status": "True"}] if complete else []
    spec = {} if deadline_s is None else {"activeDeadlineSeconds": deadline_s}
    meta = {"name": "j", **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {})}
    return {"metadata": meta, "spec": spec, "status": {"startTime": "2026-01-01T00:00:00Z", "conditions": conditions}}


def ended(code=0, reason=None, message="", seconds=1):
    reason = reason or ("Completed" if code == 0 else "Error")
    times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": f"2026-01-01T00:00:{seconds:02}Z"}
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, **times}}


RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def waiting(reason):
    return {"waiting": {"reason": reason, "message": "m"}}


def pod(uid="u", *, phase="Running", agent=None, scorer=None, init=None, gone=False, deleted_s=None, **more):
    """The agent is an init container where there is a scorer."""
    first = [("prepare", init), ("agent", agent if scorer is not None else None)]
    main = [("scorer", scorer)] if scorer is not None else [("agent", agent)]

    def listed(states):
        return [{"name": name, "state": state} for name, state in states if state is not None]

    meta = {"uid": uid, "name": f"p-{uid}", "creationTimestamp": "2026-01-01T00:00:00Z"}
    if deleted_s is not None:
        meta |= {"deletionTimestamp": f"2026-01-01T00:00:{deleted_s:02}Z", "deletionGracePeriodSeconds": 1}
    status = {"phase": phase, "initContainerStatuses": listed(first), "containerStatuses": listed(main), **more}
    return PodView(pod={"metadata": meta, "status": status}, is_gone=gone)


def condition(kind, status="True", **more):
    return {"conditions": [{"type": kind, "status": status, **more}]}


DEAD = {"deleted_s": 9, "gone": True}
PODS_OF_A_FAULT = {
    "evicted": (job(failed="BackoffLimitExceeded"), [pod(phase="Failed", reason="Evicted", agent=ended(137))]),
    "node shut down": (job(), [pod(phase="Failed", reason="Terminated", agent=ended(143))]),
    "no room at its node": (job(), [pod(phase="Failed", reason="OutOfmemory")]),
    "node lost": (job(), [pod(reason="NodeLost", agent=RUNNING)]),
    "preempted": (job(), [pod(agent=RUNNING, **condition("DisruptionTarget", reason="PreemptionByScheduler"))]),
    "disrupted, then failed": (
        job(failed="BackoffLimitExceeded"),
        [pod(phase="Failed", agent=ended(137), **condition("DisruptionTarget", reason="DeletionByTaintManager"))],
    ),
    "deleted": (job(), [pod(agent=RUNNING, deleted_s=9)]),
    "deleted and killed by that": (job(), [pod(phase="Failed", agent=ended(137), **DEAD)]),
    "gone": (job(), [pod(agent=RUNNING, gone=True)]),
    "node forgot its end": (job(), [pod(phase="Failed", agent=ended(137, "ContainerStatusUnknown"))]),
    "not started": (job(), [pod(phase="Failed", agent=ended(128, "StartError", "no such file"))]),
    "bad image name": (job(), [pod(phase="Pending", agent=waiting("InvalidImageName"))]),
    "image not there": (job(), [pod(phase="Pending", agent=waiting("ErrImageNeverPull"))]),
    "setup failed": (job(failed="BackoffLimitExceeded"), [pod(phase="Failed", init=ended(1), agent=waiting("x"))]),
    "job gone": (None, [pod(agent=RUNNING)]),
    "job deleted": (job(deleted=True), [pod(agent=RUNNING)]),
    "a second pod": (job(), [pod(agent=RUNNING, gone=True), pod("v", agent=RUNNING)]),
    "only a second pod": (job(), [pod("v", phase="Succeeded", agent=ended())]),
    "no pod left": (job(failed="BackoffLimitExceeded"), []),
    "no pod left and no word": (job(), []),
}


@pytest.mark.parametrize("name", PODS_OF_A_FAULT)
def test_what_a_cluster_does_to_an_attempt_is_a_fault_of_nobody(name):
    known, pods = PODS_OF_A_FAULT[name]
    seen = look(known, pods, bound="u", agent="agent", scorer=None)
    assert seen.fault is not None
    assert seen.is_over
    outcome, message = judge_agent(seen, manifest(), limits=LIMITS, num_calls=3)
    assert (outcome, message) == (Outcome.INFRA_ERROR, seen.fault)


GOING_ON = {
    "no pod yet": (job(), [], None),
    "pending": (job(), [pod(phase="Pending")], None),
    "pulling": (job(), [pod(phase="Pending", agent=waiting("ImagePullBackOff"))], "u"),
    "waits for its keys": (job(), [pod(phase="Pending", agent=waiting("CreateContainerConfigError"))], "u"),
    "running": (job(), [pod(agent=RUNNING)], "u"),
    "its job is complete, its pod does not say so yet": (job(complete=True), [pod(agent=RUNNING)], "u"),
    "its job has failed, its pod does not say so yet": (job(failed="BackoffLimitExceeded"), [pod(agent=RUNNING)], "u"),
    "its last container has ended, its pod not yet": (job(), [pod(agent=ended())], "u"),
}


@pytest.mark.parametrize("name", GOING_ON)
def test_what_may_still_come_is_waited_for(name):
    known, pods, bound = GOING_ON[name]
    seen = look(known, pods, bound=bound, agent="agent", scorer=None)
    assert not seen.is_over
    assert seen.has_begun == ("running" in name or "pod does not say" in name or "ended" in name)


def test_why_a_pod_waits_is_said():
    pulling = look(job(), [pod(phase="Pending", agent=waiting("ErrImagePull"))], bound="u", agent="agent", scorer=None)
    assert pulling.waiting == "container agent: ErrImagePull: m"
    nowhere = pod(phase="Pending", **condition("PodScheduled", "False", reason="Unschedulable", message="0/3"))
    assert look(job(), [nowhere], bound="u", agent="agent", scorer=None).waiting == "Unschedulable: 0/3"


def test_the_first_pod_is_the_attempts_until_one_is_bound():
    seen = look(job(), [pod("a", agent=RUNNING), pod("b", agent=RUNNING)], bound=None, agent="agent", scorer=None)
    assert "second pod (b)" in seen.fault


DECIDED = {
    "succeeded": (job(), [pod(phase="Succeeded", agent=ended())]),
    "failed by itself": (job(), [pod(phase="Failed", agent=ended(3))]),
    "succeeded, then deleted": (None, [pod(phase="Succeeded", agent=ended(), **DEAD)]),
    "ended well, then its pod was deleted": (job(), [pod(agent=ended(), deleted_s=9)]),
}


@pytest.mark.parametrize("name", DECIDED)
def test_an_end_of_its_own_decides(name):
    known, pods = DECIDED[name]
    seen = look(known, pods, bound="u", agent="agent", scorer=None)
    assert seen.is_decided
    assert seen.fault is None
    assert seen.agent is not None


def test_a_container_beside_it_is_not_waited_for():
    view = pod(agent=ended())
    view.pod["status"]["containerStatuses"].append({"name": "beside", "state": RUNNING})
    assert look(job(), [view], bound="u", agent="agent", scorer=None).is_decided


def test_with_a_scorer_the_agents_end_decides_nothing():
    begun = [pod(agent=ended(), scorer=RUNNING)]
    assert not look(job(), begun, bound="u", agent="agent", scorer="scorer").is_over
    over = [pod(phase="Succeeded", agent=ended(), scorer=ended(message="1"))]
    done = look(job(), over, bound="u", agent="agent", scorer="scorer")
    assert (done.is_decided, done.agent.exit_code, done.scorer.message) == (True, 0, "1")


@pytest.mark.parametrize(
    "known",
    [job(failed="DeadlineExceeded"), job(deadline_s=8)],
    ids=["the job says it", "its pod was deleted at that time"],
)
def test_a_deadline_is_told_from_a_deletion(known):
    seen = look(known, [pod(phase="Failed", agent=ended(137), **DEAD)], bound="u", agent="agent", scorer=None)
    assert (seen.out_of_time, seen.fault) == (True, None)
    early = look(job(deadline_s=9), [pod(agent=ended(137), **DEAD)], bound="u", agent="agent", scorer=None)
    assert (early.out_of_time, early.fault is None) == (False, False)


def test_a_complete_job_whose_pod_is_gone_has_come_to_its_end():
    assert look(job(complete=True), [], bound="u", agent="agent", scorer=None).is_complete


def manifest(*, has_memory_limit=True, is_timed=True):
    nothing = {"name": "j", "job": {}, "secret": {}, "policy": None, "agent": "agent", "scorer": None}
    return Manifest(**nothing, has_memory_limit=has_memory_limit, is_timed=is_timed)


def end(code=0, reason="", message="", seconds=1.0):
    return ContainerEnd(exit_code=code, reason=reason, message=message, seconds=seconds)


def told(code):
    return json.dumps({"exit_code": code})


def dies(code):
    return Seen(is_decided=True, agent=end(message=told(code)))


LATE = Seen(out_of_time=True, has_begun=True)
JUDGED = {
    "ends well": (dies(0), {}, 1, Outcome.OK, None),
    "ends well without a call": (dies(0), {}, 0, Outcome.OK, None),
    "fails after a call": (dies(3), {}, 1, Outcome.OK, "ended with exit code 3"),
    "fails at once": (dies(3), {}, 0, Outcome.AGENT_ERROR, "exit code 3"),
    "is not there": (dies(127), {}, 0, Outcome.INFRA_ERROR, "cannot run the agent's command"),
    "is a container that fails": (
        Seen(is_decided=True, agent=end(2)), {"is_timed": False}, 0, Outcome.AGENT_ERROR, "exit code 2",
    ),
    "writes nonsense as its end": (
        Seen(is_decided=True, agent=end(message='{"exit_code": "x"}')), {}, 1, Outcome.OK, None,
    ),
    "is killed at its time": (
        Seen(is_decided=True, agent=end(message=told(137), seconds=10)), {}, 1, Outcome.AGENT_TIMEOUT, "within 10 s",
    ),
    "is killed before its time": (Seen(is_decided=True, agent=end(message=told(137))), {}, 1, Outcome.OK, "code 137"),
    "has no memory left of its own": (
        Seen(is_decided=True, agent=end(137, "OOMKilled")), {}, 1, Outcome.AGENT_ERROR, "limit of memory",
    ),
    "has no memory left, its script survived": (
        Seen(is_decided=True, agent=end(0, "OOMKilled", told(137))), {}, 1, Outcome.AGENT_ERROR, "limit of memory",
    ),
    "has no memory left of its node's": (
        Seen(is_decided=True, agent=end(137, "OOMKilled")), {"has_memory_limit": False}, 1, Outcome.INFRA_ERROR, "node",
    ),
    "is of a template and late": (LATE, {"is_timed": False}, 0, Outcome.AGENT_TIMEOUT, "activeDeadlineSeconds"),
    "was called for, of a template, and late": (
        Seen(out_of_time=True), {"is_timed": False}, 1, Outcome.AGENT_TIMEOUT, "activeDeadlineSeconds",
    ),
    "never began": (Seen(out_of_time=True), {"is_timed": False}, 0, Outcome.INFRA_ERROR, "deadline"),
    "began too late": (LATE, {}, 1, Outcome.INFRA_ERROR, "deadline"),
    "is gone with its pod": (Seen(is_complete=True), {}, 1, Outcome.OK, None),
    "is gone without a trace": (Seen(is_decided=True), {}, 0, Outcome.INFRA_ERROR, "did not run"),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_outcomes_follow_from_typed_status(name):
    seen, changes, num_calls, outcome, text = JUDGED[name]
    found, message = judge_agent(seen, manifest(**changes), limits=LIMITS, num_calls=num_calls)
    assert found is outcome
    assert message is text or text in message


@pytest.mark.parametrize(
    ("scorer", "reward", "failure"),
    [
        (end(message="0.5"), 0.5, None),
        (end(message="tests ran\n\n0.5\n"), 0.5, None),
        (end(message='{"reward": 1, "calls": {"c1": 0.25}}'), 1.0, None),
        (end(message="null"), None, None),
        (end(message=""), None, "without a verdict"),
        (end(message="NaN"), None, "want a finite number"),
        (end(message='{"reward": 1, "calls": {"c2": 1}}'), None, "did not make"),
        (end(1, "Error"), None, "exit code 1 (Error)"),
        (end(137, "Error", seconds=5), None, "within 5 s"),
        (end(137, "OOMKilled"), None, "exit code 137 (OOMKilled)"),
        (None, None, "did not run"),
    ],
)
def test_verdicts_are_read_from_the_scorers_last_message(scorer, reward, failure):
    verdict = read_verdict(Seen(is_decided=True, scorer=scorer), ["c1"], score_s=5)
    assert verdict.reward == reward
    assert verdict.failure is failure or failure in verdict.failure
