"""A deterministic engine: the answer is a function of the prompt. For tests, demos and load measurements.

Everything around sampling is real: chunks come one by one with an optional delay, stop tokens, stop strings and the
token limit end an answer, pause holds running answers in their place, closing the iterator stops them, and every chunk
carries the version of the moment. The log-probability of a token is a fixed function of its id.

Under a constraint the script is followed as far as it goes: where its next token is not allowed, one that is allowed
is put before it, so that "Rome", asked for as JSON with a `city`, becomes {"city":"Rome"}.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from manege.engine.base import Chunk, EngineCapabilities, EngineInfo, Sampling, Weights
from manege.engine.constraints import Grammars, Guide
from manege.errors import ContextOverflowError, EngineError
from manege.types import FinishReason, PolicyVersion

__all__ = ["ScriptedEngine", "hashed_reply", "scripted_logprob"]

Reply = Callable[[Sequence[int]], Sequence[int]]

_CLOSING = ('"', "}", "]")
"""Put in before others, in this order: they lead to the end of what is open in JSON."""


def scripted_logprob(token: int) -> float:
    """The log-probability that this engine reports for a token."""
    return -0.25 * (1 + token % 8)


def hashed_reply(*, num_tokens: int, first_id: int, last_id: int, end: Sequence[int] = ()) -> Reply:
    """Answers of `num_tokens` ids from `first_id` to `last_id`, different for every prompt, followed by `end`."""

    def reply(prompt_ids: Sequence[int]) -> Sequence[int]:
        state = zlib.crc32(repr(list(prompt_ids)).encode())
        ids = []
        for _ in range(num_tokens):
            state = (1664525 * state + 1013904223) % 2**32
            ids.append(first_id + (state >> 8) % (last_id - first_id + 1))
        return [*ids, *end]

    return reply


class ScriptedEngine:
    """See `engine.base.Engine`. Temperature, top-p and seed change nothing."""

    capabilities = EngineCapabilities(
        inflight=frozenset({"drain", "abort_continue", "keep"}), weights=frozenset({"shared", "folder"})
    )

    def __init__(
        self,
        reply: Reply,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        grammars: Grammars | None = None,
        context_limit: int = 8192,
        token_delay_s: float = 0.0,
        chunk_size: int = 1,
    ) -> None:
        """`decode` is needed for stop strings only, `grammars` for constraints. `chunk_size`: tokens per chunk."""
        self._reply = reply
        self._decode = decode
        self._grammars = grammars
        self._context_limit = context_limit
        self._token_delay_s = token_delay_s
        self._chunk_size = chunk_size
        self._version = PolicyVersion(0)
        self._running = asyncio.Event()
        self._running.set()
        self._keeps = False
        self._num_clears = 0
        """How often answers under way lost their cache, if there were one."""
        self._closed = False
        self.num_running = 0
        self._stats = {"prefilled": 0.0, "sampled": 0.0}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        room = self._context_limit - len(prompt_ids)
        if room < 1:
            raise ContextOverflowError(
                f"the prompt has {len(prompt_ids)} tokens and the context {self._context_limit}; shorten the prompt"
            )
        ids, finish = self._answer(prompt_ids, sampling, min(room, sampling.max_new_tokens))
        self._stats["prefilled"] += len(prompt_ids)
        self.num_running += 1
        num_clears, cache_version = -1, self._version
        try:
            for start in range(0, max(len(ids), 1), self._chunk_size):
                part = ids[start : start + self._chunk_size]
                if self._token_delay_s:
                    await asyncio.sleep(self._token_delay_s * len(part))
                await self._running.wait()
                if self._closed:
                    raise EngineError("the engine was closed during a generation; start it again")
                self._stats["sampled"] += len(part)
                if num_clears != self._num_clears:
                    num_clears, cache_version = self._num_clears, self._version
                yield Chunk(
                    ids=part,
                    logprobs=[scripted_logprob(token) for token in part],
                    version=self._version,
                    old_cache=cache_version != self._version,
                    finish_reason=finish if start + self._chunk_size >= len(ids) else None,
                )
        finally:
            self.num_running -= 1

    async def pause(self, *, keep: bool = False) -> None:
        # A token is sampled between two awaits, so none is under way now.
        self._running.clear()
        self._keeps = keep
        self._num_clears += not keep

    async def resume(self) -> None:
        self._keeps = False
        self._running.set()

    async def load(self, weights: Weights, version: PolicyVersion) -> None:
        self._version = version
        self._num_clears += not self._keeps

    async def info(self) -> EngineInfo:
        return EngineInfo(
            model="scripted",
            context_limit=self._context_limit,
            version=self._version,
            num_running=self.num_running,
            paused=not self._running.is_set(),
            stats=dict(self._stats),
        )

    async def close(self) -> None:
        self._closed = True
        self._running.set()

    def _answer(self, prompt_ids: Sequence[int], sampling: Sampling, limit: int) -> tuple[Sequence[int], FinishReason]:
        if self._closed:
            raise EngineError("the engine is closed; start it again")
        if sampling.stop_strings and self._decode is None:
            raise EngineError("this scripted engine has no `decode`, so it cannot look for stop strings")
        guide = self._guide(sampling)
        script = deque(self._reply(prompt_ids))
        ids: list[int] = []
        while script or (guide and not guide.can_end):
            token = self._next_allowed(guide, script) if guide else script.popleft()
            ids.append(token)
            if token in sampling.stop_ids or self._ends_in_text(ids, sampling.stop_strings):
                return ids, FinishReason.STOP
            if guide and guide.advance(token):
                return ids, FinishReason.STOP
            if len(ids) == limit:
                return ids, FinishReason.LENGTH
        return ids, FinishReason.STOP

    def _guide(self, sampling: Sampling) -> Guide | None:
        if sampling.constraint is None:
            return None
        if self._grammars is None:
            raise EngineError("this scripted engine has no `grammars`, so it cannot follow a constraint")
        return self._grammars.guide(sampling.constraint, sampling.stop_ids)

    def _next_allowed(self, guide: Guide, script: deque[int]) -> int:
        allowed_V = guide.allowed_V()
        if script and allowed_V[script[0]]:
            return script.popleft()
        assert self._grammars is not None
        closing = (self._grammars.token_id(text) for text in _CLOSING)
        return next((id for id in closing if id is not None and allowed_V[id]), int(allowed_V.argmax()))

    def _ends_in_text(self, ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        if not stop_strings or self._decode is None:
            return False
        text = self._decode(ids)
        return any(stop in text for stop in stop_strings)
