"""Attempts as Jobs: makes what is missing, waits for what a cluster shows, and judges it.

Level-triggered. Where an attempt's Job is, and which pod it is bound to, is written into the rollout's log before it
matters (`kubernetes.job`, `kubernetes.pod`); everything else is looked up. So a runner that is cancelled leaves the Job
alone, and another one that is given the same claim goes on where it stopped, whatever happened meanwhile. The Secret
with the attempt's keys is made last, once the first pod is bound: no pod starts before, and a second one ends the
attempt. `run` removes nothing, so that its result is not lost with a controller that dies before it is posted; what
still runs then is what `discard` is for. Ended Jobs stay until their time to live is over.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manege.client import Claim, Client
from manege.config import RunConfig
from manege.controller.engine_failure import check_engine
from manege.controller.kubernetes.api import Api
from manege.controller.kubernetes.jobs import Jobs
from manege.controller.kubernetes.journal import Journal
from manege.controller.kubernetes.judging import judge_agent, read_verdict
from manege.controller.kubernetes.manifest import Manifest, build, check
from manege.controller.kubernetes.names import ROLLOUT, Owner, job_name, rollout_label
from manege.controller.kubernetes.status import OUT_OF_MEMORY, Seen, look
from manege.controller.kubernetes.view import View
from manege.controller.outcome import judge_score
from manege.controller.reach import reach
from manege.controller.verdict import Verdict
from manege.errors import ConfigError, ManegeError
from manege.logs import get_logger, kv
from manege.store.base import Ending
from manege.types import JsonObject, Outcome

__all__ = ["KubernetesRunner"]

_LOOK_S = 5.0
"""Between two looks at an attempt of which nothing is heard."""
_CONTROLS = ("control", "control-1", "control-2")
"""Jobs with which a scorer is tried on a workspace that no agent has touched: the next one where a cluster failed."""
_CLOSE_S = 5.0
"""What is not removed by then, the next controller of that name removes."""

_log = get_logger("kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Followed:
    """How a Job ended."""

    seen: Seen
    evidence: Mapping[str, Any]


class KubernetesRunner:
    """`adopt` once, then `run` any number of attempts at once; `close` at the end."""

    def __init__(
        self,
        client: Client,
        *,
        name: str,
        folder: Path,
        apis: Sequence[Api],
        namespaces: Sequence[str] = (),
        jobs_per_minute: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: the controller's. `apis`: the clusters, among which attempts are spread. `namespaces`: that may be
        used in each; none: its context's."""
        self.folder = folder
        self._client = client
        self._owner = Owner(gateway_url=client.url, controller=name)
        self._views = {
            api.name: {each: View(api, each, self._owner.selector) for each in namespaces or (api.namespace,)}
            for api in apis
        }
        self._apis = apis
        self._clock = clock
        self._jobs = Jobs(jobs_per_minute=jobs_per_minute, clock=clock)
        self._journal = Journal(client)
        self._discards: set[asyncio.Task[None]] = set()

    async def prepare(self, config: RunConfig) -> None:
        """Raises HarnessError for a run whose attempts cannot be Jobs, ConfigError for a namespace not served."""
        check(config)
        for views in self._views.values():
            self._view_of(views, config)

    async def adopt(self, claims: Sequence[Claim]) -> None:
        """Begin to look at the clusters. Raises ClusterError where that is refused."""
        for view in self._all_views():
            view.start()
        for view in self._all_views():
            await view.synced()
        known = {name for claim in claims for name in _names(claim)}
        for view in self._all_views():
            for name, job in list(view.jobs().items()):
                if self._owner.owns(job["metadata"]["labels"]) and name not in known and not _has_ended(view, job):
                    _log.info(kv("job without a rollout removed", job=name))
                    await self._jobs.remove(view, job)

    async def run(self, claim: Claim, config: RunConfig) -> Ending:
        """The whole attempt."""
        evidence: dict[str, Any] = {}
        try:
            place = await self._place(claim, config)
            return await self._carry_out(claim, config, place, evidence)
        except ManegeError as error:
            return Ending(outcome=Outcome.INFRA_ERROR, message=str(error), evidence=evidence)

    async def discard(self, claim: Claim) -> None:
        """Tries until the API servers have heard it; a controller that stops meanwhile waits for them a little."""
        task = asyncio.create_task(self._discard(claim), name=f"discard {job_name(claim)}")
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)
        await asyncio.shield(task)

    async def _discard(self, claim: Claim) -> None:
        for name in _names(claim):
            for view in self._all_views():
                job = view.jobs().get(name)
                if job is None and not view.is_fresh:
                    job = await self._jobs.find(view, name)
                if job is not None and not _has_ended(view, job):
                    await self._jobs.remove(view, job)

    async def close(self) -> None:
        """The Jobs go on."""
        if self._discards:
            await asyncio.wait(self._discards, timeout=_CLOSE_S)
        for task in self._discards:
            task.cancel()
        for view in self._all_views():
            await view.stop()
        for api in self._apis:
            await api.aclose()

    async def _carry_out(self, claim: Claim, config: RunConfig, view: View, evidence: dict[str, Any]) -> Ending:
        rollout, limits = claim.rollout, config.agent.limits
        manifest = self._build(claim, config, view)
        followed = await self._follow(claim, config, view, manifest)
        evidence |= followed.evidence
        seen = followed.seen
        calls = (await reach(lambda: self._client.calls([rollout.spec.id]))).get(rollout.spec.id, [])
        evidence |= {"num_calls": len(calls), "seconds": _seconds(seen)}
        outcome, message = judge_agent(seen, manifest, limits=limits, num_calls=len(calls))
        if seen.agent is not None and seen.agent.reason != OUT_OF_MEMORY:
            await check_engine(self._client, rollout, calls, has_failed=(outcome, message) != (Outcome.OK, None))
        if manifest.scorer is None or outcome is Outcome.INFRA_ERROR:
            return Ending(outcome=outcome, message=message, evidence=evidence)
        verdict, control = await self._journal.posted(claim) if seen.scorer is None else None, None
        if verdict is None:
            verdict = read_verdict(seen, [call.id for call in calls], score_s=limits.score_s)
        if verdict.failure is not None:
            if seen.scorer is None and not (seen.out_of_time and seen.agent is not None):
                return _unscored(outcome, message, evidence)
            control = await self._control(claim, config, view)
        outcome, message = judge_score(outcome, message, verdict, control)
        return Ending(
            outcome=outcome,
            reward=verdict.reward,
            message=message,
            evidence=evidence,
            call_rewards=verdict.call_rewards,
            is_final=outcome is Outcome.INFRA_ERROR,
        )

    async def _control(self, claim: Claim, config: RunConfig, view: View) -> Verdict:
        """What the scorer says of a workspace that no agent has touched."""
        fault = None
        for part in _CONTROLS:
            manifest = self._build(claim, config, view, control=part)
            seen = (await self._follow(claim, config, view, manifest)).seen
            if seen.fault is None:
                return read_verdict(seen, [], score_s=config.agent.limits.score_s)
            fault = seen.fault
        return Verdict(reward=None, failure=fault)

    async def _follow(self, claim: Claim, config: RunConfig, view: View, manifest: Manifest) -> _Followed:
        """Make the Job unless there is one, and wait until it is over."""
        view.keep(manifest.name)
        try:
            return await self._follow_kept(claim, config, view, manifest)
        finally:
            view.forget(manifest.name)

    async def _follow_kept(self, claim: Claim, config: RunConfig, view: View, manifest: Manifest) -> _Followed:
        bound = await self._journal.event(claim, "kubernetes.pod", manifest.name)
        uid: str | None = None if bound is None else bound["uid"]
        evidence: dict[str, Any] = {"job": manifest.name, "namespace": view.namespace, "cluster": view.api.name}
        evidence |= {"pod": bound["pod"]} if bound is not None else {}
        job = await self._jobs.find(view, manifest.name)
        if job is None and uid is None:
            job = await self._jobs.make(view, manifest, pending_s=config.kubernetes.pending_s)
        has_secret = False
        pending_until_s = self._clock() + config.kubernetes.pending_s
        while True:
            turn = view.turn(manifest.name)
            job = view.jobs().get(manifest.name) or await self._jobs.confirm(view, manifest.name, job)
            pods = view.pods(manifest.name)
            seen = look(job, pods, bound=uid, agent=manifest.agent, scorer=manifest.scorer)
            if seen.is_over and all(each.uid != uid for each in pods):
                # Jobs and pods are watched apart: its pod may only not have been seen yet.
                pods = await self._jobs.list_pods(view, manifest.name)
                seen = look(job, pods, bound=uid, agent=manifest.agent, scorer=manifest.scorer)
            if uid is None and pods and not seen.is_over:
                first = min(pods, key=lambda each: (each.pod["metadata"]["creationTimestamp"], each.uid))
                uid, evidence["pod"] = first.uid, first.pod["metadata"]["name"]
                await self._journal.note(claim, "kubernetes.pod", job=manifest.name, uid=uid, pod=evidence["pod"])
                continue
            if uid is not None and job is not None and not has_secret and not seen.is_over:
                has_secret = await self._jobs.give_keys(view, manifest, job)
                continue
            if seen.is_over:
                return _Followed(seen=seen, evidence=evidence)
            if seen.has_begun or not view.is_fresh:
                pending_until_s = self._clock() + config.kubernetes.pending_s
            elif self._clock() > pending_until_s and manifest.agent is not None:
                why = seen.waiting or "its pod does not start"
                fault = f"nothing ran within {config.kubernetes.pending_s:g} s (kubernetes.pending_s): {why}"
                return _Followed(seen=Seen(fault=fault), evidence=evidence)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await turn.wait()

    async def _place(self, claim: Claim, config: RunConfig) -> View:
        """Where its Job is, or shall be; what is left of earlier attempts is removed."""
        rollout = claim.rollout
        placed = await self._journal.event(claim, "kubernetes.job", job_name(claim))
        if placed is not None and (view := self._views.get(placed["cluster"], {}).get(placed["namespace"])) is not None:
            return view
        fresh = [name for name, views in self._views.items() if self._view_of(views, config).is_fresh]
        names = fresh or list(self._views)
        digest = hashlib.sha256(f"{rollout.attempt}:{rollout.spec.id}".encode()).digest()
        view = self._view_of(self._views[names[digest[0] % len(names)]], config)
        place = {"cluster": view.api.name, "namespace": view.namespace}
        await self._journal.note(claim, "kubernetes.job", job=job_name(claim), **place)
        await self._remove_earlier(claim)
        return view

    async def _remove_earlier(self, claim: Claim) -> None:
        """Jobs of attempts whose controllers lost them: their agents have no key any more."""
        label = rollout_label(claim.rollout.spec.id)
        for view in self._all_views():
            for job in list(view.jobs().values()):
                labels = job["metadata"]["labels"]
                is_earlier = int(labels["manege/attempt"]) < claim.rollout.attempt
                if labels.get(ROLLOUT) == label and is_earlier and not _has_ended(view, job):
                    await self._jobs.remove(view, job)

    def _build(self, claim: Claim, config: RunConfig, view: View, *, control: str | None = None) -> Manifest:
        url = (config.kubernetes.gateway_url or self._client.url).rstrip("/")
        return build(claim, config, owner=self._owner, namespace=view.namespace, gateway_url=url, control=control)

    def _view_of(self, views: Mapping[str, View], config: RunConfig) -> View:
        wanted = config.kubernetes.namespace or next(iter(views))
        if wanted not in views:
            raise ConfigError(
                f"kubernetes.namespace = {wanted!r}, but this controller serves {', '.join(views)}; start it with "
                f"--namespace {wanted}"
            )
        return views[wanted]

    def _all_views(self) -> list[View]:
        return [view for views in self._views.values() for view in views.values()]


def _names(claim: Claim) -> list[str]:
    """Of all Jobs that an attempt may have."""
    return [job_name(claim), *(job_name(claim, part=part) for part in _CONTROLS)]


def _has_ended(view: View, job: JsonObject) -> bool:
    """Nothing of it runs any more, and it may stay."""
    conditions = (job.get("status") or {}).get("conditions") or []
    phases = [(each.pod.get("status") or {}).get("phase") for each in view.pods(job["metadata"]["name"])]
    is_over = any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)
    return is_over or any(phase in ("Succeeded", "Failed") for phase in phases)


def _seconds(seen: Seen) -> dict[str, float]:
    ends = {"run": seen.agent, "score": seen.scorer}
    return {stage: end.seconds for stage, end in ends.items() if end is not None}


def _unscored(outcome: Outcome, message: str | None, evidence: Mapping[str, Any]) -> Ending:
    """The scorer's container never ran, or its pod is gone with what it said."""
    if outcome is Outcome.OK:
        outcome, message = Outcome.INFRA_ERROR, "its Job came to an end, but the scorer's verdict is gone with its pod"
    return Ending(outcome=outcome, message=message, evidence=evidence)
