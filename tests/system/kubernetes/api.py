"""The API server as the tests and their kubelet ask it: requests by JSON, and waiting for what a watch tells."""

import asyncio
import json
from contextlib import aclosing

import httpx

from tests.system.kubernetes.cluster import ADMIN

MERGE = "application/merge-patch+json"
_UNTIL_S = 90
"""Far more than anything takes."""


class Api:
    """`async with Api(cluster) as api`; methods raise httpx.HTTPStatusError, whose text is what the server said."""

    def __init__(self, cluster, token=ADMIN):
        self._http = httpx.AsyncClient(
            base_url=cluster.url,
            headers={"Authorization": f"Bearer {token}"},
            verify=cluster.tls(),
            trust_env=False,
            timeout=httpx.Timeout(30, read=90),
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self._http.aclose()

    async def get(self, path, **query):
        return await self._request("GET", path, params=query)

    async def create(self, path, body):
        return await self._request("POST", path, json=body)

    async def patch(self, path, body):
        """As a merge patch."""
        return await self._request("PATCH", path, content=json.dumps(body), headers={"Content-Type": MERGE})

    async def delete(self, path, **options):
        """With what depends on it, in the background, unless the options say otherwise."""
        return await self._request("DELETE", path, json={"propagationPolicy": "Background", **options})

    async def events(self, path, *, version, **query):
        """What happens to a list's objects after a version: pairs of type and object. Ends when the server says so."""
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "60", **query}
        async with self._http.stream("GET", path, params=query) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]

    async def until(self, path, holds, **query):
        """The list's objects, by name, as soon as `holds(objects)`. Raises TimeoutError."""
        async with asyncio.timeout(_UNTIL_S):
            return await self._until(path, holds, query)

    async def _until(self, path, holds, query):
        while True:
            listed = await self.get(path, **query)
            objects = {entry["metadata"]["name"]: entry for entry in listed["items"]}
            if holds(objects):
                return objects
            version = listed["metadata"]["resourceVersion"]
            async with aclosing(self.events(path, version=version, **query)) as events:
                async for kind, entry in events:
                    if kind == "DELETED":
                        objects.pop(entry["metadata"]["name"], None)
                    else:
                        objects[entry["metadata"]["name"]] = entry
                    if holds(objects):
                        return objects

    async def _request(self, method, path, **what):
        answer = await self._http.request(method, path, **what)
        if answer.is_error:
            raise httpx.HTTPStatusError(f"{method} {path}: {answer.text}", request=answer.request, response=answer)
        return answer.json()


async def persist(ask):
    """Repeat a request while the server is away; None for an object that is gone or was changed by another."""
    while True:
        try:
            return await ask()
        except httpx.TransportError:
            await asyncio.sleep(0.1)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (404, 409):
                return None
            if error.response.status_code not in (429, 500, 503):
                raise
            await asyncio.sleep(0.1)
