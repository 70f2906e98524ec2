"""One engine behind the gateway: how it was registered, how busy it is, whether it answers."""

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Literal

from manege.engine.base import Engine, Sampling, collect
from manege.engine.messages import MessagesEngine
from manege.engine.upstream import UpstreamEngine
from manege.errors import ManegeError, UnprocessableError

__all__ = ["Member", "Mode", "Registration", "choose", "probe"]

PROBE_S = 30.0
"""For the first answer of an engine; a GPU that still compiles takes seconds."""
CHECK_S = 5.0
"""For the answer of an engine that is asked whether it is back."""
MAX_EXTRA_CALLS = 4
"""An engine that has this many calls more than twice those of the idlest one is overloaded."""

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
    """`messages`: it takes chat completions and returns its ids; `tokens`: it speaks vLLM's token wire."""

    @property
    def root(self) -> str:
        """What tells endpoints apart."""
        return self.endpoint.rstrip("/").removesuffix("/v1")


class Member:
    """An engine and what the pool knows about it; exactly one of `tokens` and `messages` is set."""

    def __init__(self, registration: Registration | None, given: Engine | None = None) -> None:
        """`given`: the gateway's own engine, which has no registration."""
        self.name = "" if registration is None else registration.root
        self.model = "" if registration is None else registration.model
        self.tokens = given
        self.messages: MessagesEngine | None = None
        self.num_running = 0
        self.is_healthy = True
        if registration is not None and registration.mode == "messages":
            self.messages = MessagesEngine(registration.endpoint, version=registration.version)
        elif registration is not None:
            self.tokens = UpstreamEngine(registration.endpoint, version=registration.version)

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
    """Raises UnprocessableError for an endpoint that does not answer, or not with one token in mode `tokens`."""
    member = Member(entry)
    try:
        async with asyncio.timeout(PROBE_S):
            if member.messages is not None:
                await member.messages.check()
            elif member.tokens is not None:
                await collect(member.tokens.generate([0], Sampling(max_new_tokens=1)))
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
        what = "no token could be sampled from token ids"
        advice = (
            "It must serve vLLM's token wire: start vLLM with --enable-scale-out --logprobs-mode processed_logprobs, "
            "or `manege engine`"
        )
    return UnprocessableError(
        f"endpoint {entry.endpoint} of model {entry.model!r} is not registered, since {what}: {reason}. {advice}"
    )
