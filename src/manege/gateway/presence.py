"""Signs of life: what this gateway tells the others of its database, and anyone who looks, and who else lives.

Told every BEAT_S, and at once while others wait for it: whether it holds new calls and for which pause, its calls in
flight, how long the oldest call, the pause and the silence of an engine last, and when it last saw progress. On a
database of its own it is alone, and nobody is looked for.

Who lives is told by signs that come, not by their times, so that neither clocks that differ nor a database that was
away for a while make anyone dead.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from manege.errors import StoreError
from manege.gateway.hold import Gate
from manege.gateway.totals import Totals
from manege.gateway.watchdog import Progress, Watchdog, ages
from manege.logs import get_logger, kv
from manege.store.base import GatewayState
from manege.store.sql import SqlStore
from manege.types import JsonObject

__all__ = ["BEAT_S", "Presence"]

BEAT_S = 2.0
MISSED_BEATS = 5
"""A gateway whose sign has not changed for so many of our own beats is dead: 10 s."""
FORGET_S = 600.0
"""Signs of gateways that ended without leaving are kept for so long, for people who look."""

_log = get_logger("gateway")


class Presence:
    """Of one gateway."""

    def __init__(
        self,
        store: SqlStore,
        gate: Gate,
        progress: Progress,
        totals: Totals,
        clock: Callable[[], float],
        name: str | None = None,
    ) -> None:
        """`name`: of one that takes the place of a dead one with the same, whose sign it replaces."""
        self._store, self._gate, self._progress, self._totals, self._clock = store, gate, progress, totals, clock
        self.id = name or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._watchdog = Watchdog()
        self._told = asyncio.Event()
        self._signs: dict[str, tuple[float, int]] = {}
        """Of others: when it was given, by their clock, and how many beats of ours it has been the same."""

    async def begin(self) -> None:
        """Before the first call, so that a pause that begins from now on waits for this gateway, too."""
        for other in await self._store.gateways():
            if other.id == self.id:
                self._totals.go_on_from(other.state)
            elif not self._store.is_shared or other.seen_s < self._clock() - FORGET_S:
                await self._store.leave(other.id)
        await self._beat()

    async def run(self) -> None:
        """Until it is cancelled."""
        loop, is_silent = asyncio.get_running_loop(), False
        while True:
            next_s = loop.time() + BEAT_S
            try:
                await self._look()
                await self._beat()
                is_silent = False
                while await self._is_told(next_s - loop.time()):
                    await self._beat()
            except StoreError as error:
                if not is_silent:
                    _log.warning(kv("signs of life cannot be given", reason=error))
                is_silent = True
                await asyncio.sleep(BEAT_S)

    def tell(self) -> None:
        """Something changed that another gateway may wait for."""
        if self._store.is_shared:
            self._told.set()

    async def end(self) -> None:
        """No more signs; a database that is away need not know."""
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._store.leave(self.id)

    async def others(self) -> Sequence[JsonObject]:
        """What the other gateways that live said last."""
        if not self._store.is_shared:
            return []
        found = [other for other in await self._store.gateways() if other.id != self.id]
        return [other.state for other in found if self._missed(other) < MISSED_BEATS]

    async def oldest(self) -> dict[str, float]:
        """Since when the oldest thing of each kind waits, in seconds since the epoch."""
        return {**await self._store.pending(), **self._oldest_here()}

    def _oldest_here(self) -> dict[str, float]:
        """Of what the database does not know."""
        oldest = self._gate.oldest()
        if since_s := oldest.get("call_in_flight"):
            oldest["engine"] = max(self._progress.last_token_s, since_s)
        return oldest

    async def _look(self) -> None:
        """At what waits here, and at who else lives."""
        oldest, progress_s = await self.oldest(), self._progress.last_s
        if self._store.is_shared:
            found = [other for other in await self._store.gateways() if other.id != self.id]
            self._signs = {other.id: (other.seen_s, self._missed(other) + 1) for other in found}
            progress_s = max([progress_s, *(other.state["progress_s"] for other in found)])
        self._watchdog.look(oldest, progress_s, self._clock())

    def _missed(self, other: GatewayState) -> int:
        seen_s, num_beats = self._signs.get(other.id, (other.seen_s, 0))
        return num_beats if seen_s == other.seen_s else 0

    async def _beat(self) -> None:
        pause = self._gate.pause
        state = {
            "pause": pause and pause.id,
            "version": pause and pause.version,
            "in_flight": self._gate.num_in_flight,
            "held": self._gate.num_held,
            "oldest": ages(self._oldest_here(), self._clock()),
            "progress_s": self._progress.last_s,
            **self._totals.told(),
        }
        await self._store.beat(self.id, state)

    async def _is_told(self, wait_s: float) -> bool:
        """Whether `tell` was called within so many seconds."""
        try:
            async with asyncio.timeout(wait_s):
                await self._told.wait()
        except TimeoutError:
            return False
        self._told.clear()
        return True
