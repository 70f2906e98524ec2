"""What a gateway does when its database changes, by its own hand or by another gateway's: the only place that says so.

At once, in the event loop, before whoever wrote learns of it: long polls look again, and what was remembered of what
changed is forgotten. What needs the store (the pause, the registered engines) is done by a task right after, and done
again until it works.
"""

import asyncio

from manege.errors import StoreError
from manege.gateway.pauses import PAUSE_KEY
from manege.gateway.pool import MODELS_KEY
from manege.gateway.services import Services
from manege.logs import get_logger, kv
from manege.store.base import Changes

__all__ = ["Following"]

RETRY_S = 1.0

_log = get_logger("gateway")


class Following:
    """Of one gateway, from its creation on."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._keys = {PAUSE_KEY: services.pauses.follow, MODELS_KEY: services.engine.follow}
        self._changed = asyncio.Event()
        services.store.subscribe(self._heed)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                for follow in self._keys.values():
                    await follow()
            except StoreError as error:
                _log.warning(kv("what another gateway changed is not known yet", reason=error))
                self._changed.set()
                await asyncio.sleep(RETRY_S)

    def _heed(self, changes: Changes) -> None:
        services = self._services
        services.feed.changed()
        if changes.everything:
            services.settings.forget_all()
        if changes.rollouts:
            services.progress.made()
        services.settings.forget(changes.runs)
        for memory in (services.conversations, services.prefixes):
            for rollout_id in changes.rollouts:
                memory.forget(rollout_id)
        if changes.everything or not self._keys.keys().isdisjoint(changes.keys):
            self._changed.set()
