"""What a Job and its pods say about an attempt, by the typed fields of their status and never by their texts. Pure.

In: the Job as it was last seen (None: it is gone), its pods as they were last seen, gone ones included, and which of
them the attempt is bound to. Out: whether it is over, and what ended it. What is nobody's fault but the cluster's is a
`fault`: eviction, preemption, lost nodes, images that cannot be had, a Job or pod deleted by hand, a second pod.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from manege.types import JsonObject

__all__ = ["ContainerEnd", "PodView", "Seen", "look"]

_OUT_OF_TIME = "DeadlineExceeded"
_NEVER = frozenset({"InvalidImageName", "ErrImageNeverPull"})
"""Why a container waits that will wait for ever."""
_NOT_STARTED = frozenset({"ContainerCannotRun", "StartError", "ContainerStatusUnknown", "CreateContainerError"})
"""Why a container is over that has not run, or whose end its node has forgotten."""
OUT_OF_MEMORY = "OOMKilled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod as it was last seen."""

    pod: JsonObject
    is_gone: bool = False

    @property
    def is_going(self) -> bool:
        """Whether it is gone or being deleted."""
        return self.is_gone or "deletionTimestamp" in self.pod["metadata"]

    @property
    def uid(self) -> str:
        """It tells pods of the same name apart."""
        return self.pod["metadata"]["uid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEnd:
    """How a container ended."""

    exit_code: int
    reason: str
    """`Completed`, `Error`, `OOMKilled`, ..."""
    message: str
    """What it wrote as its termination message."""
    seconds: float
    """How long it ran; whole seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An attempt as its cluster shows it."""

    fault: str | None = None
    """Why it is over through no fault of the agent; None: it is not."""
    out_of_time: bool = False
    """Its Job was ended at its deadline."""
    is_complete: bool = False
    """Its Job came to its end, though its pod is not there any more to say how."""
    has_begun: bool = False
    """The agent's container runs or ran."""
    agent: ContainerEnd | None = None
    scorer: ContainerEnd | None = None
    is_decided: bool = False
    """Nothing that is still to come matters."""
    waiting: str | None = None
    """Why the pod does not run, in its own words."""

    @property
    def is_over(self) -> bool:
        """Nothing more will happen, or nothing more matters."""
        return self.fault is not None or self.out_of_time or self.is_complete or self.is_decided


def look(
    job: JsonObject | None, pods: Sequence[PodView], *, bound: str | None, agent: str | None, scorer: str | None
) -> Seen:
    """`bound`: uid of the pod that the attempt belongs to; None: to none yet. `agent`, `scorer`: names of containers;
    None: there is none."""
    own = next((view for view in pods if view.uid == bound), None) if bound else _first(pods)
    seen = Seen() if own is None else _look_at(own, agent, scorer)
    if seen.is_decided or seen.fault is not None:
        return seen
    failed = None if job is None else _condition(job, "Failed")
    is_going = own is not None and own.is_going
    deciding = seen.agent if scorer is None else seen.scorer
    if deciding is not None and deciding.exit_code == 0 and (is_going or job is None or failed is not None):
        return replace(seen, is_decided=True)  # what came to its end has its result
    if (bound or own) and (others := [view.uid for view in pods if own is None or view.uid != own.uid]):
        return Seen(
            fault=f"its Job started a second pod ({others[0]}): the first one is lost", has_begun=seen.has_begun
        )
    if job is None:
        return Seen(fault="its Job is gone: somebody deleted it, or its time to stay is over", has_begun=seen.has_begun)
    if "deletionTimestamp" in job["metadata"]:
        return Seen(fault="its Job is being deleted by somebody else", has_begun=seen.has_begun)
    if own is not None and not is_going:
        return seen  # Jobs and pods are watched apart: how it ended is still to come
    if (failed is not None and failed.get("reason") == _OUT_OF_TIME) or (own is not None and _is_late(job, own.pod)):
        return Seen(out_of_time=True, has_begun=seen.has_begun, agent=seen.agent)
    if _condition(job, "Complete") is not None:
        return Seen(is_complete=True, has_begun=True)
    if is_going:
        return Seen(fault="its pod was deleted: by hand, or its node is lost or drained", has_begun=seen.has_begun)
    if failed is not None or bound:
        why = "its pod is gone" if failed is None else f"its Job failed ({failed.get('reason')}) and its pod is gone"
        return Seen(fault=why, has_begun=seen.has_begun)
    return seen


def _is_late(job: JsonObject, pod: JsonObject) -> bool:
    """Whether a pod was deleted at its Job's deadline, which the Job says only afterwards."""
    meta, began_s = pod["metadata"], _time_s((job.get("status") or {}).get("startTime"))
    deadline_s, gone_s = job["spec"].get("activeDeadlineSeconds"), _time_s(meta.get("deletionTimestamp"))
    if began_s is None or deadline_s is None or gone_s is None:
        return False
    return gone_s - meta.get("deletionGracePeriodSeconds", 0) >= began_s + deadline_s


def _look_at(view: PodView, agent: str | None, scorer: str | None) -> Seen:
    """What the pod alone says."""
    status = view.pod.get("status") or {}
    states = dict(_states(status))
    ends = {name: _end(state["terminated"]) for name, state in states.items() if state.get("terminated")}
    agent_end, scorer_end = ends.get(agent or ""), ends.get(scorer or "")
    has_begun = agent_end is not None or "running" in states.get(agent or "", {})
    known: dict[str, Any] = {"agent": agent_end, "scorer": scorer_end, "has_begun": has_begun}
    fault = _fault(view.pod, status, states, ends, agent)
    # What came to its end before the cluster took the pod away has its result.
    if scorer_end is not None and scorer_end.exit_code == 0 and status.get("phase") != "Failed":
        fault = None
    if fault is not None:
        return Seen(fault=fault, **known)
    deciding = scorer_end if scorer is not None else agent_end
    # A pod that is being deleted fails because its containers are killed.
    is_over = status.get("phase") == "Succeeded" or (status.get("phase") == "Failed" and not view.is_going)
    if status.get("reason") == _OUT_OF_TIME and deciding is None:
        return Seen(out_of_time=True, **known)
    main = [entry["name"] for entry in status.get("containerStatuses") or []]
    is_decided = is_over or (deciding is not None and not view.is_going and any(name not in ends for name in main))
    return Seen(is_decided=is_decided, waiting=_waiting(status, states), **known)


def _fault(
    pod: JsonObject,
    status: Mapping[str, Any],
    states: Mapping[str, Any],
    ends: Mapping[str, ContainerEnd],
    agent: str | None,
) -> str | None:
    disrupted = _condition(pod, "DisruptionTarget")
    if disrupted is not None:
        return f"its pod was disrupted: {disrupted.get('reason')}"
    reason = status.get("reason")
    if reason is not None and reason != _OUT_OF_TIME and (status.get("phase") == "Failed" or reason == "NodeLost"):
        return f"its pod failed through its node: {reason}"
    for name, state in states.items():
        why = (state.get("waiting") or {}).get("reason")
        if why in _NEVER:
            return f"container {name} cannot start: {why}"
    for name, end in ends.items():
        if end.reason in _NOT_STARTED:
            return f"container {name} did not run: {end.reason}: {end.message[:500]}"
    for entry in status.get("initContainerStatuses") or []:
        end = ends.get(entry["name"])
        if entry["name"] != agent and end is not None and end.exit_code != 0:
            return f"container {entry['name']} failed with exit code {end.exit_code}: {end.message[:500]}"
    return None


def _waiting(status: Mapping[str, Any], states: Mapping[str, Any]) -> str | None:
    for name, state in states.items():
        waiting = state.get("waiting")
        if waiting and waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return f"container {name}: {waiting['reason']}: {waiting.get('message', '')}"[:500]
    unscheduled = _condition({"status": status}, "PodScheduled", "False")
    return None if unscheduled is None else f"{unscheduled.get('reason')}: {unscheduled.get('message', '')}"[:500]


def _states(status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for field in ("initContainerStatuses", "containerStatuses"):
        for entry in status.get(field) or []:
            yield entry["name"], entry.get("state") or {}


def _end(terminated: Mapping[str, Any]) -> ContainerEnd:
    began, ended = (_time_s(terminated.get(name)) for name in ("startedAt", "finishedAt"))
    return ContainerEnd(
        exit_code=terminated["exitCode"],
        reason=terminated.get("reason") or "",
        message=terminated.get("message") or "",
        seconds=0 if began is None or ended is None else ended - began,
    )


def _condition(thing: JsonObject, kind: str, status: str = "True") -> Mapping[str, Any] | None:
    conditions = (thing.get("status") or {}).get("conditions") or []
    return next((entry for entry in conditions if entry.get("type") == kind and entry.get("status") == status), None)


def _first(pods: Sequence[PodView]) -> PodView | None:
    return min(pods, key=lambda view: (view.pod["metadata"]["creationTimestamp"], view.uid), default=None)


def _time_s(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
