"""The answers of an engine elsewhere: each is read as it arrives, waits where a pause holds it, goes on after it.

A task reads each answer, however slowly its caller takes it, so that a token has the version of the weights that were
in use when it came. One that the server cuts goes on with a request for the rest (`partial`), after the pause if there
is one. Closing the iterator ends the request, and with it the connection: the server then stops sampling.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import orjson

from manege.engine.base import Chunk, Sampling
from manege.engine.partial import PartialAnswer
from manege.errors import ContextOverflowError, EngineError

__all__ = ["Put", "RemoteAnswers", "Wire", "beginning", "read_reply"]

Put: TypeAlias = Callable[[Chunk], None]


class Wire(Protocol):
    """How one kind of server is spoken to."""

    async def learn(self) -> int:
        """The server's context limit, asked for unless it is known, with the version of its weights."""
        ...

    async def read(self, prompt_ids: Sequence[int], sampling: Sampling, put: Put) -> None:
        """One request: put every chunk, the last with a finish reason. Raises EngineError, ProtocolError."""
        ...

    def forget(self) -> None:
        """A request failed: the server may be another one by now."""
        ...


class RemoteAnswers:
    """Of one server."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._open = asyncio.Event()
        self._open.set()
        self._num_pauses = 0
        self.num_running = 0

    @property
    def is_held(self) -> bool:
        """Paused from here."""
        return not self._open.is_set()

    def hold(self) -> None:
        """No request is made from now on."""
        self._open.clear()
        self._num_pauses += 1

    def release(self) -> None:
        """Go on. Safe to repeat."""
        self._open.set()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """See Engine."""
        limit = await self._wire.learn()
        room = limit - len(prompt_ids)
        if room < 1:
            raise ContextOverflowError(
                f"the prompt has {len(prompt_ids)} tokens and the context {limit}; shorten the prompt"
            )
        answer = PartialAnswer(prompt_ids, replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)))
        arrived: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        reading = asyncio.create_task(self._read(answer, arrived.put_nowait), name="engine-answer")
        self.num_running += 1
        try:
            while True:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason:
                    return
        finally:
            self.num_running -= 1
            reading.cancel()
            await asyncio.wait({reading})

    async def _read(self, answer: PartialAnswer, put: Callable[[Chunk | Exception], None]) -> None:
        def put_all(chunk: Chunk) -> None:
            for each in answer.add(chunk):
                put(each)

        try:
            while not answer.is_whole:
                await self._open.wait()
                await self._wire.learn()
                num_pauses = self._num_pauses
                prompt_ids, sampling = answer.request()
                await self._wire.read(prompt_ids, sampling, put_all)
                answer.end_request(by_pause=num_pauses != self._num_pauses)
        except Exception as error:  # whatever it is, it belongs to the caller, who would wait for ever
            self._wire.forget()
            put(error)


def read_reply(status: int, reply: bytes, url: str) -> Any:
    """The JSON of a whole answer. Raises EngineError for a failure, or what is no JSON."""
    if status >= 300:
        raise EngineError(f"{url} answered {status}: {beginning(reply)}")
    try:
        return orjson.loads(reply) if reply else {}
    except orjson.JSONDecodeError as error:
        raise EngineError(f"{url} answered no JSON: {reply[:200]!r}") from error


def beginning(reply: bytes) -> str:
    """Of a body, for error messages."""
    return reply[:500].decode(errors="replace")
