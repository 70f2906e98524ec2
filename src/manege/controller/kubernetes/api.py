"""The Kubernetes API over HTTP: objects as JSON, failures by their status.

What may pass is tried again with growing delays, as long as it takes up to `PATIENCE_S`: no connection, 429 (for as
long as the server says), 5xx. Nothing else is. A write whose answer was lost is thus sent twice: names are
deterministic, so a second creation is answered with 409 AlreadyExists, a second deletion with 404.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import httpx2
from lightkube import KubeConfig
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.core.exceptions import ConfigError as KubeConfigError

from manege.errors import ClusterError, ConfigError
from manege.logs import get_logger, kv
from manege.types import JsonObject

__all__ = ["Api", "ApiAwayError", "ApiError"]

PATIENCE_S = 60.0
MAX_DELAY_S = 10.0
TIMEOUT_S = 30.0
WATCH_S = 60
"""A watch is asked for anew so often: one whose connection died unnoticed shows nothing for no longer than this."""
PAGE = 500
"""Objects per answer of a list."""

_KIND_PATHS = {
    "Job": "apis/batch/v1/namespaces/{}/jobs",
    "Pod": "api/v1/namespaces/{}/pods",
    "Secret": "api/v1/namespaces/{}/secrets",
    "NetworkPolicy": "apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "ResourceQuota": "api/v1/namespaces/{}/resourcequotas",
    "LimitRange": "api/v1/namespaces/{}/limitranges",
}

_log = get_logger("kubernetes")


class ApiError(ClusterError):
    """The API server answered with a failure."""

    def __init__(self, message: str, *, http_status: int, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.http_status, self.reason, self.retry_after_s = http_status, reason, retry_after_s
        """`reason`: one word of the API's, such as `AlreadyExists`."""

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later."""
        return self.http_status == 429 or self.http_status >= 500


class ApiAwayError(ClusterError):
    """The API server cannot be reached, or broke off."""


class Api:
    """One cluster. `async with Api.connect(context) as api`."""

    def __init__(self, http: httpx2.AsyncClient, *, name: str, namespace: str) -> None:
        """`namespace`: its context's."""
        self.name, self.namespace = name, namespace
        self._http = http

    @classmethod
    def connect(cls, context: str | None) -> Self:
        """By the context of the kubeconfig (`KUBECONFIG`, else ~/.kube/config), or of the pod that we run in. Raises
        ConfigError."""
        try:
            found = (_file() if context is not None else KubeConfig.from_env()).get(context)
            assert found is not None
            params = ConnectionParams(timeout=httpx2.Timeout(TIMEOUT_S), trust_env=False)
            http = AsyncClient(found, params)
        except (KubeConfigError, KeyError, OSError, ValueError) as error:
            raise ConfigError(
                f"cannot connect to Kubernetes, context {context or 'of the environment'}: {error}"
            ) from error
        return cls(http, name=found.context_name, namespace=found.namespace)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def create(self, thing: JsonObject) -> JsonObject:
        """Raises ApiError, 409 for what exists."""
        return await self._send("POST", _path(thing["kind"], thing["metadata"]["namespace"]), thing)

    async def get(self, kind: str, namespace: str, name: str) -> JsonObject | None:
        """None: there is none."""
        try:
            return await self._send("GET", f"{_path(kind, namespace)}/{name}")
        except ApiError as error:
            if error.http_status == 404:
                return None
            raise

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str | None = None) -> None:
        """With all that it owns; what is gone already is fine, and so is another one of that name than `uid`."""
        body: dict[str, Any] = {"propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            await self._send("DELETE", f"{_path(kind, namespace)}/{name}", body)
        except ApiError as error:
            if error.http_status not in (404, 409):
                raise

    async def allows(self, namespace: str, verb: str, group: str, resource: str) -> bool:
        """Whether we have this right."""
        wanted = {"namespace": namespace, "verb": verb, "group": group, "resource": resource}
        review = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
        asked = {**review, "spec": {"resourceAttributes": wanted}}
        answer = await self._send("POST", "apis/authorization.k8s.io/v1/selfsubjectaccessreviews", asked)
        return answer["status"]["allowed"]

    async def list(self, kind: str, namespace: str, selector: str) -> tuple[list[JsonObject], str]:
        """All objects with these labels, and the version of the list."""
        found: list[JsonObject] = []
        query: dict[str, str] = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            page = await self._send("GET", _path(kind, namespace), query=query, patience_s=0)
            found += page.get("items") or []
            if not (more := page["metadata"].get("continue")):
                return found, page["metadata"]["resourceVersion"]
            query["continue"] = more

    async def watch(
        self, kind: str, namespace: str, selector: str, version: str
    ) -> AsyncIterator[tuple[str, JsonObject]]:
        """`OPEN` once it is connected, then what happens after `version`: `ADDED`, `MODIFIED`, `DELETED`, and
        `BOOKMARK`, which only brings a newer version. Ends when the server closes it. Raises ApiError, 410 when the
        version is too old, ApiAwayError."""
        query = {
            "labelSelector": selector, "watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }  # fmt: skip
        timeout = httpx2.Timeout(TIMEOUT_S, read=WATCH_S + TIMEOUT_S)
        try:
            async with self._http.stream("GET", _path(kind, namespace), params=query, timeout=timeout) as response:
                if not response.is_success:
                    raise _failure(response, await response.aread())
                yield "OPEN", {}
                async for line in response.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _status_failure(event["object"], event["object"].get("code", 500))
                    yield event["type"], event["object"]
        except (httpx2.TransportError, json.JSONDecodeError) as error:
            raise self._away(error) from error

    async def _send(
        self,
        method: str,
        path: str,
        body: JsonObject | None = None,
        *,
        query: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> dict[str, Any]:
        delay_s, began_s = 0.1, time.monotonic()
        while True:
            try:
                response = await self._http.request(method, path, json=body, params=query)
                if response.is_success:
                    return response.json()
                failure: ClusterError = _failure(response, response.content)
            except (httpx2.TransportError, json.JSONDecodeError) as error:
                failure = self._away(error)
            wait_s = delay_s * random.uniform(0.75, 1.25)
            if isinstance(failure, ApiError):
                if not failure.may_pass:
                    raise failure
                wait_s = failure.retry_after_s or wait_s
            if time.monotonic() + wait_s - began_s > patience_s:
                raise failure
            _log.info(kv("trying again", cluster=self.name, after_s=round(wait_s, 2), reason=failure))
            await asyncio.sleep(wait_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    def _away(self, error: Exception) -> ApiAwayError:
        return ApiAwayError(
            f"the API server of cluster {self.name} cannot be reached ({type(error).__name__}: {error})"
        )


def _file() -> KubeConfig:
    return KubeConfig.from_file(os.environ.get("KUBECONFIG") or "~/.kube/config")


def _path(kind: str, namespace: str) -> str:
    return _KIND_PATHS[kind].format(namespace)


def _failure(response: httpx2.Response, content: bytes) -> ApiError:
    try:
        status = json.loads(content)
    except ValueError:
        status = {}
    after = response.headers.get("retry-after", "")
    retry_after_s = float(after) if after.isdecimal() else None
    return _status_failure(status if isinstance(status, dict) else {}, response.status_code, retry_after_s)


def _status_failure(status: JsonObject, code: int, retry_after_s: float | None = None) -> ApiError:
    reason, message = status.get("reason") or "", status.get("message") or "no message"
    return ApiError(
        f"Kubernetes answered {code} {reason}: {message}", http_status=code, reason=reason, retry_after_s=retry_after_s
    )
