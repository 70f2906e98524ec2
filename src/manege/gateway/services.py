"""What the handlers of one gateway share, made once by `create_app` and passed down.

Sampling settings of a run are read from the store once and kept until the run is put again, since every model call
needs them. State that changes lives in the members (gate, feeds, counters), never in this record.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from manege.config import SamplingConfig
from manege.errors import NotFoundError
from manege.gateway.auth import Auth
from manege.gateway.continuation import Conversations
from manege.gateway.feed import Feed
from manege.gateway.hold import Gate
from manege.gateway.metrics import Counters
from manege.gateway.pool import EnginePool
from manege.rendering.base import Renderer
from manege.store.sql import SqlStore
from manege.types import RunId

__all__ = ["RunSettings", "Services"]


class RunSettings:
    """Sampling settings per run; the defaults for a run without any (`default`, Agent Lightning's)."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._sampling: dict[RunId, SamplingConfig] = {}

    async def sampling(self, run: RunId) -> SamplingConfig:
        """Temperature of training calls and the upper bound on new tokens."""
        found = self._sampling.get(run)
        if found is None:
            found = self._sampling[run] = await self._read(run)
        return found

    def forget(self, run: RunId) -> None:
        """Called when a run's config is put."""
        self._sampling.pop(run, None)

    async def _read(self, run: RunId) -> SamplingConfig:
        try:
            config = (await self._store.get_run(run)).config
            return SamplingConfig.model_validate(config.get("sampling", {}))
        except (NotFoundError, ValidationError):
            # A run of a foreign trainer keeps whatever config it likes.
            return SamplingConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts of one gateway."""

    store: SqlStore
    engine: EnginePool
    renderer: Renderer
    auth: Auth
    gate: Gate
    """Model calls run inside `async with gate.enter()`."""
    feed: Feed
    """Wakes long polls after writes."""
    counters: Counters
    conversations: Conversations
    settings: RunSettings
    model_name: str
    """Answered as `model`, whatever the caller asked for."""
    context_limit: int
    """Tokens of prompt + answer."""
    clock: Callable[[], float]
    """Seconds since the epoch."""
