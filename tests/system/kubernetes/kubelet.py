"""A node of the tests: takes the pods of its namespaces, as a scheduler and a kubelet would, and really runs their
containers (see `containers.py`): init containers one after the other, then the others at once, restarting none. Told
to, it fails as nodes do: it evicts and preempts pods, finds no image, schedules nothing, falls silent.
"""

import asyncio
import contextlib
import datetime
import re
import uuid

from tests.system.kubernetes.api import Api, persist
from tests.system.kubernetes.containers import KILL, TERMINATE, Container, NotReady

_HEARTBEAT_S = 1.0
_RETRY_S = 0.1


class Kubelet:
    """`async with Kubelet(...) as kubelet`; afterwards its node is gone and nothing runs."""

    def __init__(self, cluster, *, namespaces, folder, readable=()):
        """`readable`: what containers may read of this machine's /tmp, besides the folder's parent."""
        self.name = f"node-{uuid.uuid4().hex[:8]}"
        self._spare = f"{self.name}-spare"
        self.namespaces = namespaces
        self.schedules = True
        """Whether pods are given to this node; else they stay pending as if no node had room."""
        self.unpullable = {}
        """By image: the reason that its container waits with, for ever."""
        self._folder, self._readable = folder, (folder.parent, *readable)
        self._cluster = cluster
        self._service = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(cluster.port)}
        self._pods = {}
        self._tasks = set()
        self._failures = []

    async def __aenter__(self):
        self._api = Api(self._cluster)
        self._folder.mkdir(parents=True, exist_ok=True)
        # A second node, always well: Kubernetes evicts nothing while it hears of no node at all.
        for name in (self.name, self._spare):
            await self._api.create("/api/v1/nodes", {"metadata": {"name": name}})
            await self._beat(name)
        self._steady = asyncio.create_task(self._beat_forever(self._spare))
        self._spawn(self._beat_forever(self.name))
        self._spawn(self._watch_forever())
        return self

    async def __aexit__(self, *_):
        await self.crash()
        self._steady.cancel()
        for name in (self.name, self._spare):
            await persist(lambda name=name: self._api.delete(f"/api/v1/nodes/{name}"))
        await self._api.__aexit__()
        if self._failures:
            raise ExceptionGroup("the kubelet failed", self._failures)

    async def crash(self):
        """The node is lost: it says nothing any more, and nothing runs on it."""
        await self.fall_silent()
        for pod in self._pods.values():
            await pod.destroy()

    async def fall_silent(self):
        """The node is cut off: its containers run on, but it neither says nor hears anything."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def evict(self, name):
        """For want of memory on the node: the pod has failed."""
        pod = self._named(name)
        pod.verdict = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
        pod.send(KILL)
        await pod.over.wait()

    async def preempt(self, name):
        """By the scheduler, for a pod of a higher priority: it is deleted, and its status says why."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        pod = self._named(name)
        pod.status["conditions"].append({**condition, "message": "preempted", "lastTransitionTime": _now()})
        await self._tell(pod)
        await self._api.delete(pod.path)

    def kill(self, name, container, *, reason=None):
        """A container of a running pod; `reason`: "OOMKilled" for one that used more memory than its limit."""
        pod = self._named(name)
        pod.containers[container].reason = reason
        pod.containers[container].send(KILL)

    def output(self, name, container):
        """What a container has written, as text."""
        return self._named(name).containers[container].log.read_text()

    def _named(self, name):
        return next(pod for pod in self._pods.values() if pod.name == name)

    def _spawn(self, work):
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task):
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failures.append(task.exception())

    async def _beat(self, name):
        room = {"cpu": "64", "memory": "256Gi", "pods": "500"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        ready |= {"lastHeartbeatTime": _now(), "lastTransitionTime": _now()}
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        await persist(lambda: self._api.patch(f"/api/v1/nodes/{name}/status", {"status": status}))

    async def _beat_forever(self, name):
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self._beat(name)

    async def _watch_forever(self):
        while True:
            listed = await persist(lambda: self._api.get("/api/v1/pods"))
            for entry in listed["items"]:
                self._see("MODIFIED", entry)
            with contextlib.suppress(Exception):  # the server restarts; what was missed is in the next list
                async for kind, entry in self._api.events(
                    "/api/v1/pods", version=listed["metadata"]["resourceVersion"]
                ):
                    self._see(kind, entry)
            await asyncio.sleep(_RETRY_S)

    def _see(self, kind, entry):
        meta = entry["metadata"]
        if meta["namespace"] not in self.namespaces:
            return
        pod = self._pods.get(meta["uid"])
        if pod is None and kind != "DELETED" and "nodeName" not in entry["spec"] and "deletionTimestamp" not in meta:
            pod = self._pods[meta["uid"]] = Pod(entry, self._folder, self._readable, self._service)
            pod.life = self._spawn(self._live(pod))
        elif pod is not None and kind == "DELETED":
            pod.send(KILL)
            if not pod.is_running:
                pod.life.cancel()
        elif pod is not None and "deletionTimestamp" in meta and not pod.is_ending:
            pod.is_ending = True
            self._spawn(self._end(pod, meta["deletionGracePeriodSeconds"]))

    async def _live(self, pod):
        try:
            if await self._bind(pod):
                pod.status |= {"phase": "Pending", "startTime": _now(), "hostIP": "127.0.0.1", "podIP": "127.0.0.1"}
                pod.status["conditions"] = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": _now()}]
                await self._run(pod)
        finally:
            pod.over.set()

    async def _bind(self, pod):
        if not self.schedules:
            unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            pod.status["conditions"] = [
                {**unscheduled, "message": "0/1 nodes are available", "lastTransitionTime": _now()}
            ]
            await self._tell(pod)
        while not self.schedules:
            await asyncio.sleep(_RETRY_S)
        body = {"metadata": {"name": pod.name}, "target": {"apiVersion": "v1", "kind": "Node", "name": self.name}}
        return await persist(lambda: self._api.create(f"{pod.path}/binding", body)) is not None

    async def _run(self, pod):
        for spec in pod.spec.get("initContainers", []):
            code = await self._contain(pod, spec, "initContainerStatuses")
            if code != 0 or pod.verdict or pod.is_ending:
                return await self._finish(pod, "Failed")
        pod.status["phase"] = "Running"
        main = [self._contain(pod, spec, "containerStatuses") for spec in pod.spec["containers"]]
        codes = await asyncio.gather(*main)
        return await self._finish(pod, "Failed" if any(codes) else "Succeeded")

    async def _finish(self, pod, phase):
        pod.status |= {"phase": phase, **(pod.verdict or {})}
        await self._tell(pod)

    async def _contain(self, pod, spec, field):
        """A container from its creation to its end; returns its exit code."""
        container = pod.containers[spec["name"]] = Container(spec, pod, pod.folder)
        if reason := self.unpullable.get(spec["image"]):
            await self._state(pod, field, spec, {"waiting": {"reason": reason, "message": f"image {spec['image']}"}})
            await asyncio.Event().wait()
        while True:
            try:
                await container.start(self._api)
                break
            except NotReady as error:
                waiting = {"reason": "CreateContainerConfigError", "message": str(error)}
                await self._state(pod, field, spec, {"waiting": waiting})
                await asyncio.sleep(_RETRY_S)
        begun = _now()
        await self._state(pod, field, spec, {"running": {"startedAt": begun}})
        ended = await container.ended()
        await self._state(pod, field, spec, {"terminated": {**ended, "startedAt": begun, "finishedAt": _now()}})
        return ended["exitCode"]

    async def _state(self, pod, field, spec, state):
        told = {"name": spec["name"], "image": spec["image"], "imageID": "", "restartCount": 0, "state": state}
        told["ready"] = "running" in state or (field == "initContainerStatuses" and state.get("terminated") is not None)
        others = [entry for entry in pod.status.get(field, []) if entry["name"] != spec["name"]]
        pod.status[field] = [*others, told]
        await self._tell(pod)

    async def _tell(self, pod):
        await persist(
            lambda: self._api.patch(f"{pod.path}/status", {"metadata": {"uid": pod.uid}, "status": pod.status})
        )

    async def _end(self, pod, grace_s):
        if pod.is_running:
            pod.send(TERMINATE)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pod.over.wait(), grace_s)
            pod.send(KILL)
            await pod.over.wait()
        else:
            pod.life.cancel()
        await persist(lambda: self._api.delete(pod.path, gracePeriodSeconds=0, preconditions={"uid": pod.uid}))


class Pod:
    """What the node knows of a pod."""

    def __init__(self, entry, folder, readable, service):
        meta = entry["metadata"]
        self.entry, self.spec = entry, entry["spec"]
        self.name, self.namespace, self.uid = meta["name"], meta["namespace"], meta["uid"]
        self.path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self.folder, self.readable, self.service = folder / self.uid, readable, service
        self.folder.mkdir()
        self.containers = {}
        self.status = {}
        self.verdict = None
        self.life = None
        self.is_ending = False
        self.over = asyncio.Event()
        """Its last status was told."""

    @property
    def is_running(self):
        """Whether a process of it is alive."""
        return any(container.is_running for container in self.containers.values())

    def send(self, number):
        """A signal to all its containers."""
        for container in self.containers.values():
            container.send(number)

    async def destroy(self):
        """Kill what runs, and wait for it."""
        self.send(KILL)
        for container in self.containers.values():
            await container.gone()

    def field(self, path):
        """Of the downward API."""
        if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return self.entry["metadata"].get(found[1], {}).get(found[2], "")
        part, name = path.split(".")
        return {"spec": self.spec, "status": self.status, "metadata": self.entry["metadata"]}[part][name]


def _now():
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
