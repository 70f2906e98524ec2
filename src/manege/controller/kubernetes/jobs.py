"""What is asked of a cluster about Jobs, repeated for as long as the answer may still come."""

import asyncio
from collections.abc import Callable

from manege.controller.kubernetes.api import ApiAwayError, ApiError
from manege.controller.kubernetes.manifest import Manifest, owned
from manege.controller.kubernetes.status import PodView
from manege.controller.kubernetes.view import View
from manege.errors import ClusterError
from manege.logs import get_logger
from manege.types import JsonObject

__all__ = ["Jobs"]

_AGAIN_S = 1.0

_log = get_logger("kubernetes")


class Jobs:
    """Shared by all attempts of a runner. All methods raise ApiError for what no repetition can mend."""

    def __init__(self, *, jobs_per_minute: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 60 / jobs_per_minute
        self._next_s = 0.0
        self._policies: set[tuple[str, str, str]] = set()

    async def make(self, view: View, manifest: Manifest, *, pending_s: float) -> JsonObject:
        """The Job, made or found, in its turn; a server that answers with failures is asked for so long."""
        await self._take_turn()
        until_s = self._clock() + pending_s
        while True:
            try:
                await self._make_policy(view, manifest)
                return await view.api.create(manifest.job)
            except ApiAwayError as error:
                _log.warning(str(error))
                until_s = self._clock() + pending_s
            except ApiError as error:
                if error.http_status == 409 and (found := await self.find(view, manifest.name)) is not None:
                    return found
                if not error.may_pass and error.http_status != 409:
                    raise
                if self._clock() > until_s:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def _make_policy(self, view: View, manifest: Manifest) -> None:
        if manifest.policy is None:
            return
        key = view.api.name, view.namespace, manifest.policy["metadata"]["name"]
        if key in self._policies:
            return
        try:
            meta = {**manifest.policy["metadata"], "namespace": view.namespace}
            await view.api.create({**manifest.policy, "metadata": meta})
        except ApiError as error:
            if error.http_status != 409:
                raise
        self._policies.add(key)

    async def give_keys(self, view: View, manifest: Manifest, job: JsonObject) -> bool:
        """Whether the Secret is there now."""
        try:
            await view.api.create(owned(manifest.secret, job))
        except ApiAwayError as error:
            _log.warning(str(error))
            return False
        except ApiError as error:
            if error.may_pass:
                return False
            if error.http_status != 409:
                raise
        return True

    async def find(self, view: View, name: str) -> JsonObject | None:
        """The Job, as soon as the API server can say whether there is one."""
        while True:
            if (known := view.jobs().get(name)) is not None:
                return known
            try:
                return await view.api.get("Job", view.namespace, name)
            except ClusterError as error:
                await self._pass(error)

    async def list_pods(self, view: View, job: str) -> list[PodView]:
        """All that there are now."""
        while True:
            try:
                found, _ = await view.api.list("Pod", view.namespace, f"job-name={job}")
                return [PodView(pod=pod) for pod in found]
            except ClusterError as error:
                await self._pass(error)

    async def confirm(self, view: View, name: str, known: JsonObject | None) -> JsonObject | None:
        """The view does not show a Job that was there: it is gone, or not seen yet, or the view is old."""
        if not view.is_fresh:
            return known
        return await self.find(view, name)

    async def remove(self, view: View, job: JsonObject) -> None:
        """With its pods and its Secret."""
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        while True:
            try:
                return await view.api.delete("Job", view.namespace, name, uid=uid)
            except ClusterError as error:
                await self._pass(error)

    async def _pass(self, error: ClusterError) -> None:
        """Wait for what may pass. Raises the error if it will not."""
        if isinstance(error, ApiError) and not error.may_pass:
            raise error
        _log.warning(str(error))
        await asyncio.sleep(_AGAIN_S)

    async def _take_turn(self) -> None:
        now_s = self._clock()
        self._next_s = max(now_s, self._next_s) + self._pause_s
        await asyncio.sleep(self._next_s - self._pause_s - now_s)
