"""The pause of all gateways of a database: kept in the store, so that it outlives whoever asked for it.

A pause closes the gates of all gateways and waits for the calls in flight at each; then the engine pauses, so that
calls which did not end in time keep their place and go on after `resume`, under the new version. Weights change only
while the engine is paused. Any gateway may publish and resume what another one paused, also after a restart.

    pause    at one gateway   the record is written; each gateway closes its gate and says so in its sign of life
             at that gateway  when all have said so and none has calls in flight: the engine pauses, the record says it
    publish  at any           new weights, their version in the record; each gateway asks its engines for theirs
    resume   at any           the engine resumes, the record goes, all gates open

Only the gateway that was asked changes the engines. One that paused an engine of its own resumes that, whoever was
asked to, before it says that it knows of the next pause; so it cannot wake an engine that is paused anew.

Concurrency: the record decides, and changes in transactions only; `follow` makes this gateway what the record says, as
often as one likes. `_lock` orders everything that is asked of the engine here.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from manege.engine.base import Weights
from manege.errors import ConflictError, EngineError
from manege.gateway.hold import Gate, Pause
from manege.gateway.pool import EnginePool
from manege.gateway.presence import Presence
from manege.logs import get_logger, kv
from manege.store.sql import SqlStore
from manege.types import PolicyVersion

__all__ = ["PAUSE_KEY", "Pauses"]

PAUSE_KEY = "pause"
"""Of the record in the store."""
LOOK_S = 0.1
"""Between two looks at the signs of life of other gateways, while a pause waits for them."""
SETTLE_S = 5.0
"""How long a publish waits for the other gateways to know of it."""

_log = get_logger("gateway")


class Pauses:
    """Of one gateway."""

    def __init__(
        self, store: SqlStore, engine: EnginePool, gate: Gate, presence: Presence, clock: Callable[[], float]
    ) -> None:
        self._store, self._engine, self._gate, self._presence, self._clock = store, engine, gate, presence, clock
        self._lock = asyncio.Lock()
        self._has_paused = False
        """Whether an engine was paused from here, and not resumed from here since."""
        gate.on_idle = presence.tell

    async def restore(self) -> None:
        """At the start, before the first call. An engine that a pause holds is paused again: it may have been lost with
        the gateway."""
        await self.follow()
        pause = self._gate.pause
        if pause is not None and pause.engine_paused:
            _log.info(kv("still paused", reason=pause.reason, since_s=pause.since_s))
            async with self._lock:
                self._has_paused = True
                try:
                    await self._engine.pause(keep=pause.keep)
                except EngineError as error:
                    _log.warning(kv("an engine could not be paused again", reason=error))
            # It may have ended meanwhile.
            await self.follow()

    async def follow(self) -> None:
        """Do what the record says. Raises StoreError."""
        async with self._lock:
            await self._follow()

    async def pause(self, drain_s: float | None, reason: str | None = None, *, keep: bool = False) -> None:
        """Hold new calls everywhere, let those in flight end for at most `drain_s`, then pause the engine, which may
        `keep` the caches of the others. With None, only hold: the caller watches the calls in flight (Agent Lightning's
        trainer). One that lasts already goes on. Raises ConflictError if resumed meanwhile, and what an engine raises:
        then no weights can be published before a pause that works, and `resume` ends it as any other."""
        new = Pause(id=secrets.token_hex(8), reason=reason, since_s=self._clock(), keep=keep)

        def begin(known: Any) -> Any:
            if known is None:
                return asdict(new)
            how = {} if known["engine_paused"] else {"keep": keep}
            return {**known, **how, "reason": reason or known["reason"]}

        pause = Pause(**await self._store.update_value(PAUSE_KEY, begin))
        await self.follow()
        if drain_s is None or pause.engine_paused:
            return
        await self._drain(pause.id, drain_s)
        async with self._lock:
            await self._pause_engine(pause.id)

    async def resume(self) -> None:
        """Let everything go on. Safe to call when not paused."""
        async with self._lock:
            try:
                await self._engine.resume()
                self._has_paused = False
            finally:
                # Should the engine be gone, held calls learn it from the engine, now.
                await self._store.set_value(PAUSE_KEY, None)
                await self._follow()

    async def publish(self, weights: Weights) -> PolicyVersion:
        """Count a new version and load its weights. Raises ConflictError unless the engine is paused."""
        async with self._lock:
            await self._follow()
            pause = self._gate.pause
            if pause is None or not pause.engine_paused:
                raise ConflictError(
                    "weights change only while the gateway is paused: POST /proxy/pause with drain_s first"
                )
            version = await self._store.publish_version()
            await self._engine.load(weights, version)
            await self._mark(pause.id, version=version)
        await self._others_know(version)
        return version

    async def num_in_flight_elsewhere(self) -> int:
        """At the other gateways that live. One that has not said yet that it holds new calls counts as busy."""
        states, pause = await self._presence.others(), self._gate.pause
        return sum(max(state["in_flight"], int(state["pause"] != (pause and pause.id))) for state in states)

    async def _follow(self) -> None:
        record = await self._store.get_value(PAUSE_KEY)
        pause, old = None if record is None else Pause(**record), self._gate.pause
        if pause == old:
            return
        if self._has_paused and not (pause and old and pause.id == old.id):
            self._has_paused = False
            try:
                await self._engine.resume()
            except EngineError as error:
                _log.warning(kv("an engine could not be resumed", reason=error))
        if self._store.is_shared and (pause is None or pause.version):
            await self._engine.refresh()
        if pause is None:
            self._gate.release()
        else:
            self._gate.hold(pause)
        self._presence.tell()

    async def _drain(self, pause_id: str, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s):
                await self._gate.idle(pause_id)
                while self._gate.paused_for(pause_id) and await self.num_in_flight_elsewhere():
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            _log.info(kv("pausing with calls in flight", num_in_flight=self._gate.num_in_flight, drain_s=drain_s))

    async def _pause_engine(self, pause_id: str) -> None:
        pause = self._gate.pause
        if pause is None or pause.id != pause_id:
            raise _overtaken()
        self._has_paused = True
        await self._engine.pause(keep=pause.keep)
        try:
            await self._mark(pause_id, engine_paused=True)
        except ConflictError:
            self._has_paused = False
            await self._engine.resume()
            raise

    async def _mark(self, pause_id: str, **changes: Any) -> None:
        """Change the record. Raises ConflictError when it is another one by now."""

        def change(known: Any) -> Any:
            if known is None or known["id"] != pause_id:
                raise _overtaken()
            return {**known, **changes}

        await self._store.update_value(PAUSE_KEY, change)
        await self._follow()

    async def _others_know(self, version: PolicyVersion) -> None:
        """Return when the other gateways have asked their engines for the new version, or will not in time: they ask
        again when the pause ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while any(state["version"] != version for state in await self._presence.others()):
                    if self._gate.pause is None or self._gate.pause.version != version:
                        return
                    await asyncio.sleep(LOOK_S)


def _overtaken() -> ConflictError:
    return ConflictError("the gateway was resumed while a pause was draining it; pause again")
