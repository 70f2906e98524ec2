"""Jobs and pods of one namespace as the last list and what was watched since show them.

Two tasks, one per kind, list and then watch from the version of the list, for ever: a watch that ends goes on from the
last version seen, which bookmarks keep young; one whose version is too old (410) begins with a list again. They alone
write. Pods stay known after they are gone, with their last status, until their Job is forgotten. Whoever waits is woken
by any change of his Job or its pods, and looks again.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from manege.controller.kubernetes.api import MAX_DELAY_S, Api, ApiError
from manege.controller.kubernetes.status import PodView
from manege.errors import ClusterError
from manege.logs import get_logger, kv
from manege.types import JsonObject

__all__ = ["View"]

_GONE = 410

_log = get_logger("kubernetes")


class View:
    """`start()`, then `await synced()`; `stop()` at the end."""

    def __init__(self, api: Api, namespace: str, selector: str) -> None:
        self.api, self.namespace = api, namespace
        self._selector = selector
        self._jobs: dict[str, JsonObject] = {}
        self._pods: dict[str, dict[str, PodView]] = {}
        """By Job and uid."""
        self._kept: set[str] = set()
        """Jobs whose pods stay known when they are gone."""
        self._waiting: dict[str, asyncio.Event] = {}
        self._watched: dict[str, bool] = {}
        """By kind, whether what is known of it is up to date."""
        self._first: dict[str, asyncio.Future[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look. Safe to repeat."""
        if self._tasks:
            return
        loop = asyncio.get_running_loop()
        for kind in ("Job", "Pod"):
            self._first[kind] = loop.create_future()
            name = f"watch {kind}s of {self.api.name}/{self.namespace}"
            self._tasks.append(asyncio.create_task(self._follow_forever(kind), name=name))

    async def stop(self) -> None:
        """Raises what a watching task died of, which would be a bug."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()

    async def synced(self) -> None:
        """Wait for the first lists. Raises ClusterError if they are refused."""
        for first in self._first.values():
            await asyncio.shield(first)

    @property
    def is_fresh(self) -> bool:
        """Whether both kinds are being watched; else what is shown may be old."""
        return len(self._watched) == 2 and all(self._watched.values())

    def jobs(self) -> Mapping[str, JsonObject]:
        """By name."""
        return self._jobs

    def pods(self, job: str) -> list[PodView]:
        """All that this Job has or had, as far as it was seen."""
        return list(self._pods.get(job, {}).values())

    def keep(self, job: str) -> None:
        """Know its pods also when they are gone."""
        self._kept.add(job)

    def forget(self, job: str) -> None:
        """The opposite of `keep`."""
        self._kept.discard(job)
        for uid in [view.uid for view in self.pods(job) if view.is_gone]:
            self._drop(job, uid)

    def turn(self, job: str) -> asyncio.Event:
        """Set at the next change of the Job or its pods; ask for it before looking."""
        return self._waiting.setdefault(job, asyncio.Event())

    async def _follow_forever(self, kind: str) -> None:
        version, delay_s = None, 0.1
        while True:
            try:
                if version is None:
                    version = await self._list(kind)
                async for what, thing in self.api.watch(kind, self.namespace, self._selector, version):
                    self._watched[kind] = True
                    if what != "OPEN":
                        self._see(kind, what, thing)
                        version, delay_s = thing["metadata"]["resourceVersion"], 0.1
            except ClusterError as error:
                if not self._first[kind].done():
                    if isinstance(error, ApiError) and not error.may_pass:
                        self._first[kind].set_exception(error)
                        return
                elif isinstance(error, ApiError) and error.http_status == _GONE:
                    version = None
                self._watched[kind] = False
                _log.info(kv("looking again", kind=kind, namespace=self.namespace, reason=error))
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _list(self, kind: str) -> str:
        things, version = await self.api.list(kind, self.namespace, self._selector)
        if kind == "Job":
            found = {_name(thing): thing for thing in things}
            changed = found.keys() | self._jobs.keys()
            self._jobs = found
        else:
            there = {thing["metadata"]["uid"] for thing in things}
            changed = set(self._pods)
            for gone in [view for views in self._pods.values() for view in views.values() if view.uid not in there]:
                self._see(kind, "DELETED", gone.pod)
            for thing in things:
                self._see(kind, "MODIFIED", thing)
        self._watched[kind] = True
        if not self._first[kind].done():
            self._first[kind].set_result(None)
        for job in changed:
            self._wake(job)
        return version

    def _see(self, kind: str, what: str, thing: JsonObject) -> None:
        if what == "BOOKMARK":
            return
        if kind == "Job":
            job = _name(thing)
            if what == "DELETED":
                self._jobs.pop(job, None)
            else:
                self._jobs[job] = thing
        else:
            job, uid = _job_of(thing), thing["metadata"]["uid"]
            is_gone = what == "DELETED"
            if is_gone and job not in self._kept:
                self._drop(job, uid)
            else:
                self._pods.setdefault(job, {})[uid] = PodView(pod=thing, is_gone=is_gone)
        self._wake(job)

    def _drop(self, job: str, uid: str) -> None:
        views = self._pods.get(job, {})
        views.pop(uid, None)
        if not views:
            self._pods.pop(job, None)

    def _wake(self, job: str) -> None:
        event = self._waiting.pop(job, None)
        if event is not None:
            event.set()


def _name(thing: JsonObject) -> str:
    return thing["metadata"]["name"]


def _job_of(pod: JsonObject) -> str:
    """The Job that owns a pod."""
    owners: list[Any] = pod["metadata"].get("ownerReferences") or []
    return next((owner["name"] for owner in owners if owner.get("kind") == "Job"), "")
