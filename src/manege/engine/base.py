"""What the gateway asks of an inference engine: token ids in, token ids and log-probabilities out.

`generate` yields chunks as tokens are sampled and ends after the chunk that carries a finish reason. Closing the
iterator (or cancelling the task that reads it) aborts the generation: the engine stops sampling for it at the next
decode step. An engine knows nothing about messages, rollouts or losses.

Invariants: the log-probabilities are those of softmax(logits / temperature) of the sampled tokens, whatever truncation
(top-p, top-k) was used to choose them; the KV cache never outlives its weights, but for an answer that was kept in a
pause, whose chunks say so; every chunk says which policy version sampled it.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from manege.errors import EngineError
from manege.types import FinishReason, FloatArray, IntArray, PolicyVersion, VersionSpan

__all__ = [
    "Chunk",
    "Collector",
    "Constraint",
    "Engine",
    "EngineCapabilities",
    "EngineInfo",
    "Generation",
    "Sampling",
    "Weights",
    "collect",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an answer must look like; tokens that would break it are not sampled."""

    grammar: str
    """A Lark grammar as llguidance reads it (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). Where
    nothing can be added any more, the answer ends, with or without a stop id."""
    json_schema: str | None = None
    """Set where the grammar is no more than this JSON schema, which every engine knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose the next token."""

    temperature: float = 1.0
    """0 means greedy; the log-probabilities are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    """Sampling one of these ends the answer; the token is part of the answer."""
    stop_strings: Sequence[str] = ()
    """The answer ends as soon as its decoded text contains one of these; the tokens so far are the answer."""
    seed: int | None = None
    """The same seed, prompt and weights give the same tokens; None: from the engine's own generator."""
    constraint: Constraint | None = None
    """The log-probabilities are then still those without it: constrained tokens are not the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One or more sampled tokens."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    version: PolicyVersion
    old_cache: bool = False
    """Sampled over keys and values that older weights had computed."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk only."""
    num_cached: int = 0
    """Prompt tokens whose keys and values were reused; on one chunk only, the last where the engine tells it last."""
    routed_experts: str | None = None
    """Of the whole answer and its prompt, on the last chunk, where the engine tells it (`routed_experts`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A whole answer."""

    ids_R: IntArray
    logprobs_R: FloatArray
    spans: Sequence[VersionSpan]
    finish_reason: FinishReason
    num_cached: int
    routed_experts: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where new weights are: `shared` in this process's memory (changed in place), a `folder` of safetensors, or a
    trainer's memory, which they are fetched from (`transfer`)."""

    kind: str
    folder: str | None = None
    address: str | None = None
    """Of a `transfer`: HOST:PORT/PUBLICATION (`weight_sender`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is and how it is doing."""

    model: str
    context_limit: int
    """Prompt + answer tokens of one sequence."""
    version: PolicyVersion
    num_running: int = 0
    num_waiting: int = 0
    paused: bool = False
    cache_usage: float = 0.0
    """Share of the cache's room that running sequences hold, 0 to 1."""
    stats: dict[str, float] = field(default_factory=dict)
    """Counters since start: prefilled, cached, sampled tokens; seconds busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do; an impossible choice is refused at start."""

    inflight: frozenset[str]
    """Values of train.inflight: what can become of answers under way when weights change."""
    weights: frozenset[str]
    """Kinds of Weights that it loads."""


class Engine(Protocol):
    """An inference engine; implementations: local (torch), scripted, upstream (HTTP)."""

    capabilities: EngineCapabilities

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Sample an answer. Raises at the first step ContextOverflowError if the prompt leaves no room for one token,
        ProtocolError if the constraint cannot be used; EngineError if the engine fails."""
        ...

    async def pause(self, *, keep: bool = False) -> None:
        """Return when no sequence is being decoded. After `resume`, running answers go on from their ids, under the
        weights that there are then, with nothing of the old cache; with `keep`, over the keys and values they have.
        Memory that is not needed for that is free until then."""
        ...

    async def resume(self) -> None:
        """Go on. Safe to call when not paused."""
        ...

    async def load(self, weights: Weights, version: PolicyVersion) -> None:
        """Use new weights from the next token on and drop every cached key and value but those of kept answers. Called
        while paused."""
        ...

    async def info(self) -> EngineInfo:
        """Raises EngineError when the engine cannot be reached."""
        ...

    async def close(self) -> None:
        """Stop and release everything. Safe to repeat."""
        ...


class Collector:
    """Puts the chunks of an answer together; what it has is usable at any time."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._num_cached = 0
        self._finish: FinishReason | None = None
        self._routed_experts: str | None = None

    def add(self, chunk: Chunk) -> None:
        """The next chunk."""
        span = VersionSpan(first_token=len(self.ids), version=chunk.version, old_cache=chunk.old_cache)
        if chunk.ids and (not self._spans or replace(self._spans[-1], first_token=span.first_token) != span):
            self._spans.append(span)
        self.ids.extend(chunk.ids)
        self._logprobs.extend(chunk.logprobs)
        self._num_cached += chunk.num_cached
        self._finish = chunk.finish_reason or self._finish
        self._routed_experts = chunk.routed_experts or self._routed_experts

    def generation(self, *, aborted: bool = False) -> Generation:
        """What came so far, as aborted or whole. Raises EngineError if it is not whole."""
        finish = FinishReason.ABORT if aborted else self._finish
        if finish is None:
            raise EngineError("the engine ended a generation without a finish reason; see its log")
        return Generation(
            ids_R=np.asarray(self.ids, np.int32),
            logprobs_R=np.asarray(self._logprobs, np.float32),
            spans=self._spans,
            finish_reason=finish,
            num_cached=self._num_cached,
            routed_experts=self._routed_experts,
        )


async def collect(chunks: AsyncGenerator[Chunk, None]) -> Generation:
    """Read a generation to its end. Raises EngineError if it ends without a finish reason."""
    collector = Collector()
    async for chunk in chunks:
        collector.add(chunk)
    return collector.generation()
