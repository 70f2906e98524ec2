"""The engines behind the gateway: those that were registered, or else the one that it was started with.

A call goes to the registered engine with the fewest calls in progress; pausing, resuming and new weights reach every
engine. Registrations are kept in the store and are back after a restart. An engine that is forgotten, or registered
again with another version, first finishes its calls.

Concurrency: one event loop; `_changing` orders what changes the registry.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from manege.engine.base import Chunk, Engine, EngineInfo, Sampling, Weights, collect
from manege.engine.upstream import UpstreamEngine
from manege.errors import ManegeError, UnprocessableError
from manege.store.sql import SqlStore
from manege.types import PolicyVersion

__all__ = ["EnginePool", "Registration"]

PROBE_S = 30.0
"""For the first answer of an engine; a GPU that still compiles takes seconds."""
_KEY = "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An endpoint that speaks vLLM's token wire."""

    model: str
    endpoint: str
    """With or without `/v1` at its end."""
    version: int = 0
    """Of its weights, where the endpoint itself does not say."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    engine: Engine
    num_running: int = 0


class EnginePool:
    """See `engine.base.Engine`. Closes what was registered; the engine that it was given belongs to its maker."""

    def __init__(self, engine: Engine, store: SqlStore) -> None:
        self._given = _Member(engine=engine)
        self._store = store
        self._registrations: dict[str, Registration] = {}
        self._members: dict[str, _Member] = {}
        self._leaving: set[_Member] = set()
        self._changing = asyncio.Lock()

    async def restore(self) -> None:
        """Use again what was registered before a restart."""
        for entry in await self._store.get_value(_KEY) or []:
            self._put(Registration(**entry))

    @property
    def registrations(self) -> Sequence[Registration]:
        """One per endpoint."""
        return list(self._registrations.values())

    async def register(self, registrations: Sequence[Registration]) -> None:
        """Add endpoints, or change the version of known ones. Raises UnprocessableError, and adds none, if one of them
        does not answer token ids with token ids and log-probabilities."""
        async with self._changing:
            for entry in registrations:
                if _root(entry) not in self._members:
                    await _probe(entry)
            entries = self._registrations | {_root(entry): entry for entry in registrations}
            await self._store.set_value(_KEY, list(entries.values()))
            for entry in registrations:
                await self._drop(_root(entry))
                self._put(entry)

    async def clear(self) -> None:
        """Forget all endpoints; calls go to the given engine again."""
        async with self._changing:
            await self._store.set_value(_KEY, [])
            for root in list(self._members):
                await self._drop(root)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        member = self._least_busy()
        member.num_running += 1
        try:
            async with aclosing(member.engine.generate(prompt_ids, sampling)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            member.num_running -= 1
            await self._close_if_left(member)

    async def pause(self) -> None:
        await self._ask_all(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self._ask_all(lambda engine: engine.resume())

    async def load(self, weights: Weights, version: PolicyVersion) -> None:
        await self._ask_all(lambda engine: engine.load(weights, version))

    async def info(self) -> EngineInfo:
        """Of the engine that the next call goes to, with the calls of all."""
        info = await self._least_busy().engine.info()
        members = [self._given, *self._members.values(), *self._leaving]
        return replace(info, num_running=sum(member.num_running for member in members))

    async def close(self) -> None:
        members = {*self._members.values(), *self._leaving}
        await asyncio.gather(*(member.engine.close() for member in members))

    def _least_busy(self) -> _Member:
        return min(self._members.values(), key=lambda member: member.num_running, default=self._given)

    async def _ask_all(self, ask: Callable[[Engine], Awaitable[None]]) -> None:
        """Each engine is asked, whatever another one answers; then the first failure is raised."""
        members = [self._given, *self._members.values(), *self._leaving]
        for result in await asyncio.gather(*(ask(member.engine) for member in members), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _put(self, entry: Registration) -> None:
        self._registrations[_root(entry)] = entry
        self._members[_root(entry)] = _Member(engine=UpstreamEngine(entry.endpoint, version=entry.version))

    async def _drop(self, root: str) -> None:
        if member := self._members.pop(root, None):
            del self._registrations[root]
            self._leaving.add(member)
            await self._close_if_left(member)

    async def _close_if_left(self, member: _Member) -> None:
        if member in self._leaving and member.num_running == 0:
            self._leaving.discard(member)
            await member.engine.close()


def _root(entry: Registration) -> str:
    return entry.endpoint.rstrip("/").removesuffix("/v1")


async def _probe(entry: Registration) -> None:
    """Ask for one token."""
    engine = UpstreamEngine(entry.endpoint)
    try:
        async with asyncio.timeout(PROBE_S):
            await collect(engine.generate([0], Sampling(max_new_tokens=1)))
    except TimeoutError:
        raise _refused(entry, f"no answer within {PROBE_S:g} s") from None
    except ManegeError as error:
        raise _refused(entry, str(error)) from error
    finally:
        await engine.close()


def _refused(entry: Registration, reason: str) -> UnprocessableError:
    return UnprocessableError(
        f"endpoint {entry.endpoint} of model {entry.model!r} is not registered, since no token could be "
        f"sampled from token ids: {reason}. It must serve vLLM's token wire: start vLLM with --enable-scale-out "
        "--logprobs-mode processed_logprobs, or `manege engine`"
    )
