"""Client of an engine server whose weights a train engine in the server's own process changes in place.

Nothing is sent but their new version, whereupon the server drops what it has cached of the old ones.
"""

import orjson

from manege.engine.base import EngineCapabilities, Weights
from manege.engine.http1 import HttpClient
from manege.engine.upstream import UpstreamEngine
from manege.errors import EngineError
from manege.types import PolicyVersion

__all__ = ["SharedUpstreamEngine"]


class SharedUpstreamEngine(UpstreamEngine):
    """See `engine.base.Engine`."""

    capabilities = EngineCapabilities(inflight=UpstreamEngine.capabilities.inflight, weights=frozenset({"shared"}))

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._address, self._versions = url, HttpClient(url)

    async def load(self, weights: Weights, version: PolicyVersion) -> None:
        """See Engine. The weights are there already."""
        if weights.kind != "shared":
            raise EngineError(f"the engine at {self._address} has the weights of its rank, and takes no {weights.kind}")
        body = orjson.dumps({"new_version": str(version)})
        status, reply = await self._versions.request("POST", "/update_weight_version", body)
        if status >= 300:
            raise EngineError(f"{self._address} answered {status}: {reply[:500].decode(errors='replace')}")
        await self.info()

    async def close(self) -> None:
        """See Engine."""
        await self._versions.close()
        await super().close()
