"""One engine behind the gateway: how it was registered, how busy and how idle it is, whether it answers."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from manege.engine.base import Engine, EngineCapabilities, Sampling, collect
from manege.engine.messages import MessagesEngine
from manege.engine.proof import TEMPERATURE
from manege.engine.wires import token_engine
from manege.errors import ManegeError, UnprocessableError
from manege.types import EngineWire

__all__ = ["Member", "Mode", "Registration", "choose", "probe", "root_of"]

PROBE_S = 30.0
"""For the first answer of an engine; a GPU that still compiles takes seconds."""
CHECK_S = 5.0
"""For the answer of an engine that is asked whether it is back."""
MAX_EXTRA_CALLS = 4
"""An engine that has this many calls more than twice those of the idlest one is overloaded."""

_MESSAGES_CAPABILITIES = EngineCapabilities(inflight=frozenset({"drain"}), weights=frozenset())

Mode = Literal["tokens", "messages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An engine elsewhere."""

    model: str
    endpoint: str
    """With or without `/v1` at its end."""
    version: int = 0
    """Of its weights, where the endpoint itself does not say."""
    mode: Mode = "messages"
    """`messages`: it takes chat completions and returns its ids; `tokens`: it takes token ids."""
    wire: EngineWire = "vllm"
    """How it takes token ids: on vLLM's token wire, or SGLang's native one."""

    @property
    def root(self) -> str:
        """What tells endpoints apart."""
        return root_of(self.endpoint)


def root_of(endpoint: str) -> str:
    """Without its path."""
    return endpoint.rstrip("/").removesuffix("/v1")


class Member:
    """An engine and what the pool knows about it; exactly one of `tokens` and `messages` is set."""

    def __init__(
        self, name: str, engine: Engine | MessagesEngine, *, model: str = "", clock: Callable[[], float]
    ) -> None:
        """`clock`: in seconds, of its idle time."""
        self.name, self.model = name, model
        is_messages = isinstance(engine, MessagesEngine)
        self.tokens = None if is_messages else engine
        self.messages = engine if is_messages else None
        self.num_running = 0
        self.is_healthy = True
        self._clock = clock
        self._idle_s, self._idle_since_s = 0.0, clock()

    @classmethod
    def registered(cls, entry: Registration, clock: Callable[[], float]) -> "Member":
        """With a client of its own."""
        if entry.mode == "messages":
            engine = MessagesEngine(entry.endpoint, version=entry.version)
        else:
            engine = token_engine(entry.endpoint, entry.wire, version=entry.version)
        return cls(entry.root, engine, model=entry.model, clock=clock)

    @property
    def capabilities(self) -> EngineCapabilities:
        """What it can do."""
        return _MESSAGES_CAPABILITIES if self.tokens is None else self.tokens.capabilities

    @property
    def idle_s(self) -> float:
        """Seconds since its start in which it had no call."""
        return self._idle_s + (0.0 if self.num_running else self._clock() - self._idle_since_s)

    def begin(self) -> None:
        """It gets a call."""
        self._idle_s = self.idle_s
        self.num_running += 1

    def end(self) -> None:
        """A call of it has ended."""
        self.num_running -= 1
        self._idle_since_s = self._clock()

    async def check(self) -> bool:
        """Note that it is healthy again, if it is; returns whether."""
        try:
            async with asyncio.timeout(CHECK_S):
                if self.messages is not None:
                    await self.messages.check()
                elif self.tokens is not None:
                    await self.tokens.info()
        except (TimeoutError, ManegeError):
            return False
        self.is_healthy = True
        return True

    async def close(self) -> None:
        """End its calls. Safe to repeat."""
        for engine in (self.tokens, self.messages):
            if engine is not None:
                await engine.close()


def choose(members: list[Member], session: str) -> Member:
    """The healthy member that has the cache of a session, unless it is overloaded; without a session, the idlest.

    Rendezvous hashing (https://en.wikipedia.org/wiki/Rendezvous_hashing): when a member comes or goes, only the
    sessions that belong to it move.
    """
    candidates = [member for member in members if member.is_healthy] or members
    idlest = min(candidates, key=lambda member: member.num_running)
    if not session or len(candidates) == 1:
        return idlest
    home = max(candidates, key=lambda member: hashlib.blake2b(f"{member.name} {session}".encode()).digest())
    return idlest if home.num_running > 2 * idlest.num_running + MAX_EXTRA_CALLS else home


async def probe(entry: Registration) -> None:
    """Raises UnprocessableError for an endpoint that does not answer; in mode `tokens`, for one that does not sample
    from token ids, or tells log-probabilities of another temperature."""
    member = Member.registered(entry, time.monotonic)
    try:
        async with asyncio.timeout(PROBE_S):
            if member.messages is not None:
                await member.messages.check()
            elif member.tokens is not None:
                await collect(member.tokens.generate([0], Sampling(max_new_tokens=1)))
                # The first at a temperature: it is proven before.
                await collect(member.tokens.generate([0], Sampling(max_new_tokens=1, temperature=TEMPERATURE)))
    except TimeoutError:
        raise _refused(entry, f"no answer within {PROBE_S:g} s") from None
    except ManegeError as error:
        raise _refused(entry, str(error)) from error
    finally:
        await member.close()


def _refused(entry: Registration, reason: str) -> UnprocessableError:
    if entry.mode == "messages":
        what, advice = "it does not answer", "Start it first; it must serve /v1/chat/completions"
    else:
        what = "it cannot be used with token ids"
        advice = (
            "It must serve vLLM's token wire: start vLLM with --enable-scale-out --logprobs-mode processed_logprobs, "
            "or `manege engine`; or register SGLang with wire `sglang`"
            if entry.wire == "vllm"
            else "It must be SGLang, 0.5.6 or newer"
        )
    return UnprocessableError(
        f"endpoint {entry.endpoint} of model {entry.model!r} is not registered, since {what}: {reason}. {advice}"
    )
