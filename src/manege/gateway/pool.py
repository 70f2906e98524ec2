"""The engines behind the gateway: those that were registered, or else those that it was started with.

The calls of a session (a conversation) go to the engine that has its cache, unless that one is overloaded. An engine
that fails gets no more calls until a check has passed; a call that it failed before the first token is tried once more
on another healthy engine, or, where there is none, on the same one if it is back soon. Pausing, resuming and new
weights reach every engine that takes token ids; the weights of engines that take messages are changed by whoever
registered them.

Registrations are kept in the store: they are back after a restart, and every gateway of a database has the same. An
engine that is forgotten, or registered again with another version, first finishes its calls.

Concurrency: one event loop; `_changing` orders what changes the registry.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from manege.engine.base import Chunk, Engine, EngineInfo, Sampling, Weights
from manege.engine.messages import MessagesEngine
from manege.errors import EngineAwayError, EngineError, NotFoundError, UnavailableError, UnprocessableError
from manege.gateway.engine_state import EngineState, EngineStates
from manege.gateway.members import Member, Mode, Registration, choose, probe, root_of
from manege.logs import get_logger, kv
from manege.store.sql import SqlStore
from manege.types import PolicyVersion

__all__ = ["MODELS_KEY", "EnginePool", "MessagesCall", "Registration"]

MODELS_KEY = "models"
"""Of the registrations in the store."""
CHECK_INTERVAL_S = 2.0
"""Between two checks of engines that failed."""
RETRY_WAIT_S = (0.05, 0.25)
"""Before the second try, at random, so that the calls of a lost engine do not all reach the next one at once."""
BACK_S = 10.0
"""How long a call waits for the only engine: agents come again, and are answered within 30 s that it is away."""
BACK_INTERVAL_S = 0.5
"""Between two looks in that time."""

_log = get_logger("gateway")

T = TypeVar("T", covariant=True)


class MessagesCall(Protocol[T]):
    """A call over an engine that takes messages (`forward.MessagesSource`)."""

    has_begun: bool
    """Whether a part of the answer was given out."""

    async def run(self, engine: MessagesEngine, model: str) -> T:
        """Raises EngineError; then it may be run again on another engine, if it has not begun."""
        ...


class EnginePool:
    """See `engine.base.Engine`. Closes what was registered; the engines that it was given belong to their maker."""

    def __init__(
        self, engines: Mapping[str, Engine], store: SqlStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`engines`: its own, by names that stay the same; without any it serves once one is registered. `clock`: in
        seconds, of the time in which engines could have calls."""
        self._given = [Member(name, engine, clock=clock) for name, engine in engines.items()]
        self._store, self._clock = store, clock
        self._states = EngineStates()
        self._registrations: dict[str, Registration] = {}
        self._members: dict[str, Member] = {}
        self._leaving: set[Member] = set()
        self._changing = asyncio.Lock()
        self._checking: asyncio.Task[None] | None = None
        self.num_retried = 0
        """Calls that were tried on a second engine."""

    async def follow(self) -> None:
        """Serve by what is registered in the store. Raises StoreError."""
        async with self._changing:
            await self._follow()

    @property
    def registrations(self) -> Sequence[Registration]:
        """One per endpoint."""
        return list(self._registrations.values())

    @property
    def mode(self) -> Mode:
        """What the engines that serve now take."""
        for entry in self._registrations.values():
            return entry.mode
        return "tokens"

    @property
    def num_unhealthy(self) -> int:
        """Engines that failed and have not passed a check since."""
        return sum(not member.is_healthy for member in self._serving())

    async def register(self, registrations: Sequence[Registration]) -> None:
        """Add endpoints, or change the version of known ones. Raises UnprocessableError, and adds none, if one of them
        does not answer as its mode asks, or if modes would be mixed."""
        async with self._changing:
            for entry in registrations:
                known = self._registrations.get(entry.root)
                if known is None or (known.mode, known.wire) != (entry.mode, entry.wire):
                    await probe(entry)

            def add(stored: Any) -> Any:
                entries = _entries(stored) | {entry.root: entry for entry in registrations}
                _check_one_mode(entries.values())
                return list(entries.values())

            await self._store.update_value(MODELS_KEY, add)
            await self._follow()

    async def clear(self) -> None:
        """Forget all endpoints; calls go to the given engines again."""
        async with self._changing:
            await self._store.set_value(MODELS_KEY, [])
            await self._follow()

    async def forget(self, endpoint: str) -> int:
        """Give an endpoint no more calls, and return how many of this gateway's it still answers; ask again until there
        are none. Raises NotFoundError for one that is neither registered nor leaving."""
        root = root_of(endpoint)
        async with self._changing:
            is_known = root in self._registrations
            await self._store.update_value(
                MODELS_KEY, lambda stored: [entry for key, entry in _entries(stored).items() if key != root]
            )
            await self._follow()
        leaving = [member for member in self._leaving if member.name == root]
        if not (is_known or leaving):
            raise NotFoundError(f"no engine is registered at {endpoint}; GET /api/models lists them")
        return sum(member.num_running for member in leaving)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """In mode `tokens`. `session`: calls with the same one share a cache."""
        member, begun = self._choose(session), False
        while True:
            try:
                async with self._using(member), aclosing(_tokens(member).generate(prompt_ids, sampling)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except EngineError as error:
                if begun:
                    raise
                member = await self._other(member, session, error)
                begun = True

    async def forward(self, call: MessagesCall[T], session: str) -> T:
        """In mode `messages`: run a call. Raises what it raises."""
        member, is_last = self._choose(session), False
        while True:
            try:
                async with self._using(member):
                    return await call.run(_messages(member), member.model)
            except EngineError as error:
                if is_last or call.has_begun:
                    raise
                member, is_last = await self._other(member, session, error), True

    async def pause(self, *, keep: bool = False) -> None:
        await self._ask_all(lambda engine: engine.pause(keep=keep))

    async def resume(self) -> None:
        await self._ask_all(lambda engine: engine.resume())

    async def load(self, weights: Weights, version: PolicyVersion) -> None:
        if self.mode == "messages":
            raise EngineError(
                "the registered engines take messages, and their weights are changed by whoever registered them: "
                "register them again with their new version"
            )
        await self._ask_all(lambda engine: engine.load(weights, version))

    async def info(self) -> EngineInfo:
        """Of the engine that the next call goes to, with the calls of all. Raises EngineError in mode `messages`."""
        info = await _tokens(self._choose("")).info()
        return replace(info, num_running=sum(member.num_running for member in self._all()))

    async def state(self) -> EngineState:
        """Of the engines that serve now."""
        return await self._states.of(self._serving())

    async def refresh(self) -> None:
        """Ask the engines for the version of their weights, which another gateway changed."""
        await asyncio.gather(*(member.check() for member in self._all() if member.tokens is not None))

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait({self._checking})
        self._states.close()
        await asyncio.gather(*(member.close() for member in self._all() if member not in self._given))

    @asynccontextmanager
    async def _using(self, member: Member) -> AsyncIterator[None]:
        member.begin()
        try:
            yield
        except EngineError as error:
            self._lose(member, error)
            raise
        finally:
            member.end()
            await self._close_if_left(member)

    def _choose(self, session: str) -> Member:
        if not (serving := self._serving()):
            raise UnavailableError("no engine is registered; register one with POST /api/models")
        return choose(serving, session)

    async def _other(self, failed: Member, session: str, error: EngineError) -> Member:
        """Another healthy engine for a call that failed, or the same one if it is back; else raises the error."""
        others = [member for member in self._serving() if member is not failed and member.is_healthy]
        if not others:
            if isinstance(error, EngineAwayError) and await _is_back(failed):
                return failed
            raise error
        self.num_retried += 1
        await asyncio.sleep(random.uniform(*RETRY_WAIT_S))
        return choose(others, session)

    def _lose(self, member: Member, error: EngineError) -> None:
        # One that is alone is asked for as long as it is the only choice.
        is_alone = self._given == [member]
        if member.is_healthy and not is_alone and member not in self._leaving:
            member.is_healthy = False
            _log.warning(kv("an engine failed and gets no calls until it answers again", url=member.name, reason=error))
            if self._checking is None or self._checking.done():
                self._checking = asyncio.create_task(self._check_until_healthy(), name="engine-checks")

    async def _check_until_healthy(self) -> None:
        while lost := [member for member in [*self._given, *self._members.values()] if not member.is_healthy]:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await asyncio.gather(*(member.check() for member in lost))
            for member in lost:
                if member.is_healthy:
                    _log.info(kv("an engine answers again", url=member.name))

    def _serving(self) -> list[Member]:
        return list(self._members.values()) or self._given

    def _all(self) -> list[Member]:
        return [*self._given, *self._members.values(), *self._leaving]

    async def _ask_all(self, ask: Callable[[Engine], Awaitable[None]]) -> None:
        """Each engine is asked, whatever another one answers; then the first failure is raised."""
        asked = {member: ask(member.tokens) for member in self._all() if member.tokens is not None}
        results = await asyncio.gather(*asked.values(), return_exceptions=True)
        for member, result in zip(asked, results, strict=True):
            if isinstance(result, EngineError) and member.name not in str(result):
                raise type(result)(f"the engine at {member.name} failed: {result}") from result
            if isinstance(result, BaseException):
                raise result

    async def _follow(self) -> None:
        old, new = self._registrations, _entries(await self._store.get_value(MODELS_KEY))
        self._registrations = new
        for root, entry in old.items():
            if new.get(root) != entry:
                member = self._members.pop(root)
                self._leaving.add(member)
                await self._close_if_left(member)
        for root, entry in new.items():
            if root not in self._members:
                self._members[root] = Member.registered(entry, self._clock)

    async def _close_if_left(self, member: Member) -> None:
        if member in self._leaving and member.num_running == 0:
            self._leaving.discard(member)
            await member.close()


async def _is_back(member: Member) -> bool:
    try:
        async with asyncio.timeout(BACK_S):
            while not await member.check():
                await asyncio.sleep(BACK_INTERVAL_S)
    except TimeoutError:
        return False
    return True


def _entries(stored: Any) -> dict[str, Registration]:
    """By their roots, from the store."""
    entries = [Registration(**entry) for entry in stored or ()]
    return {entry.root: entry for entry in entries}


def _check_one_mode(entries: Collection[Registration]) -> None:
    if len({entry.mode for entry in entries}) > 1:
        told = ", ".join(f"{entry.endpoint} in mode {entry.mode!r}" for entry in entries)
        raise UnprocessableError(
            f"engines of both modes cannot serve together: {told}; register all with the same mode, or forget "
            "the others first (DELETE /api/models)"
        )


def _tokens(member: Member) -> Engine:
    if member.tokens is None:
        raise EngineError(f"the engine at {member.name} takes messages, no token ids")
    return member.tokens


def _messages(member: Member) -> MessagesEngine:
    if member.messages is None:
        raise EngineError("the engine takes token ids, no messages")
    return member.messages
