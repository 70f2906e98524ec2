"""The local engine: samples from a model in this process.

One worker thread computes; everything that touches the batch happens there, between two steps, in the order in which
it was asked for. The event loop hands in closures and gets all chunks of a step back in one call, so the two sides
meet twice per step however many sequences run. If the worker dies, whoever waits gets an EngineError.

The weights may be shared with a trainer that changes them in place while the engine is paused; unless running answers
are kept, the cache has no memory then.
"""

import asyncio
import random
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from manege.config import EngineConfig
from manege.engine.base import Chunk, EngineCapabilities, EngineInfo, Sampling, Weights
from manege.engine.constraints import Grammars, Guide
from manege.engine.local_batch import Batch, LiveSequence
from manege.engine.threads import ThreadChoice
from manege.errors import ContextOverflowError, EngineError, ProtocolError
from manege.logs import get_logger, kv
from manege.model.base import LanguageModel
from manege.model.folder import ModelFolder
from manege.model.llama import Llama
from manege.model.load import read_weights
from manege.types import PolicyVersion

__all__ = ["LocalEngine"]

_log = get_logger("engine")
_FIRST_VERSION = PolicyVersion(0)
_TURNS_PER_CHOICE = 20
"""Decode steps between two looks at the machine's load: a few seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Chunk | EngineError]


_Live = LiveSequence[_Reader]


class LocalEngine:
    """Implements Engine."""

    capabilities = EngineCapabilities(
        inflight=frozenset({"drain", "abort_continue", "keep"}), weights=frozenset({"shared", "folder"})
    )

    def __init__(
        self,
        model: LanguageModel,
        folder: ModelFolder,
        *,
        config: EngineConfig,
        seed: int,
        version: PolicyVersion = _FIRST_VERSION,
        max_context: int | None = None,
    ) -> None:
        self._model, self._name = model, folder.name
        self._device = next(model.module.parameters()).device
        self._context_limit = min(model.context_limit, max_context or model.context_limit, config.cache_tokens)
        self._version = version
        self._rng = random.Random(seed)
        self._threads = ThreadChoice(config.threads)
        self._num_turns = 0
        self._grammars = Grammars(folder.tokenizer, vocab_size=model.vocab_size, eos_ids=folder.eos_ids)
        self._batch: Batch[_Reader] = Batch(
            model,
            folder.tokenizer,
            max_batch=config.max_batch,
            cache_tokens=config.cache_tokens,
            prefill_chunk=config.prefill_chunk,
            # What runs models of `transformers` may wait for the device, and cannot be captured then.
            fixed_shapes=self._device.type == "cuda" and isinstance(model, Llama),
        )
        self._paused = self._keeps = False
        """In a pause that keeps them, running sequences stay in the batch over new weights."""
        # Shared between the threads, under the lock of `_wake`:
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._live: set[_Live] = set()
        self._commands: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self._ended: str | None = None
        """Why there will be no more tokens."""
        self._thread = threading.Thread(target=self._work, name="manege-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """See Engine. A prompt that is empty or has ids outside the vocabulary is a ProtocolError."""
        guide = None
        if sampling.constraint is not None:
            # In a thread of its own, since some grammars take a second to compile.
            guide = await asyncio.to_thread(self._grammars.guide, sampling.constraint, sampling.stop_ids)
        sequence = self._new_sequence(prompt_ids, sampling, guide)
        with self._wake:
            self._refuse_when_ended()
            self._live.add(sequence)
            self._post(partial(self._batch.add, sequence))
        try:
            while True:
                item = await sequence.sink.queue.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish_reason:
                    return
        finally:
            with self._wake:
                self._live.discard(sequence)
                self._post(partial(self._batch.remove, sequence))

    async def pause(self, *, keep: bool = False) -> None:
        """See Engine."""
        await self._command(partial(self._pause, keep))

    async def resume(self) -> None:
        """See Engine."""
        await self._command(self._resume)

    async def load(self, weights: Weights, version: PolicyVersion) -> None:
        """See Engine. `shared`: the weights of the model given at the start were changed in place."""
        await self._command(partial(self._load, weights, version))

    async def info(self) -> EngineInfo:
        """See Engine."""
        self._refuse_when_ended()
        return EngineInfo(
            model=self._name,
            context_limit=self._context_limit,
            version=self._version,
            num_running=len(self._batch.running),
            num_waiting=len(self._batch.waiting),
            paused=self._paused,
            cache_usage=self._batch.cache_usage,
            stats=dict(self._batch.stats),
        )

    async def close(self) -> None:
        """See Engine."""
        self._end("the engine was closed")
        await asyncio.to_thread(self._thread.join)

    def _new_sequence(self, prompt_ids: Sequence[int], sampling: Sampling, guide: Guide | None) -> _Live:
        num_prompt = len(prompt_ids)
        room = self._context_limit - num_prompt
        if room < 1:
            raise ContextOverflowError(
                f"the prompt has {num_prompt} tokens and leaves no room for an answer in the context of "
                f"{self._context_limit} tokens; shorten it"
            )
        ids_P = np.asarray(prompt_ids, np.int64)
        wrong = ids_P[(ids_P < 0) | (ids_P >= self._model.vocab_size)]
        if not num_prompt or len(wrong):
            what = (
                f"token id {wrong[0]}, outside the vocabulary of {self._model.vocab_size}"
                if num_prompt
                else "no tokens"
            )
            raise ProtocolError(f"the prompt has {what}")
        buffer = np.empty(num_prompt + min(room, sampling.max_new_tokens), np.int32)
        buffer[:num_prompt] = ids_P
        return LiveSequence(
            buffer=buffer,
            num_prompt=num_prompt,
            num_tokens=num_prompt,
            sampling=sampling,
            rng=self._rng if sampling.seed is None else random.Random(sampling.seed),
            sink=_Reader(asyncio.get_running_loop(), asyncio.Queue()),
            guide=guide,
        )

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake.notify()

    def _refuse_when_ended(self) -> None:
        if self._ended:
            raise EngineError(self._ended)

    async def _command(self, action: Callable[[], None]) -> None:
        """Run on the worker thread between two steps; its error is the caller's."""
        done: Future[None] = Future()
        with self._wake:
            self._refuse_when_ended()
            self._commands.append((done, action))
            self._wake.notify()
        # Shielded: the worker may be carrying it out when the caller is cancelled.
        await asyncio.shield(asyncio.wrap_future(done))

    # ---- On the worker thread.

    def _work(self) -> None:
        self._choose_threads()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        _log.info(kv("engine started", model=self._name, context=self._context_limit))
        try:
            while self._turn():
                pass
        except Exception as error:  # a bug, or memory is used up: nobody may wait for ever
            _log.exception("the engine's worker died")
            self._end(f"the engine failed: {type(error).__name__}: {error}")

    def _turn(self) -> bool:
        with self._wake:
            while not (self._inbox or self._commands or self._ended or self._can_step()):
                self._wake.wait()
            if self._ended:
                return False
            inbox, self._inbox = self._inbox, []
        for action in inbox:
            action()
        while command := self._next_command():
            done, action = command
            try:
                action()
            except Exception as error:  # whatever it is, it belongs to the caller
                done.set_exception(error)
            else:
                done.set_result(None)
        if self._can_step():
            self._deliver(self._batch.step(self._version))
            self._num_turns += 1
            if self._num_turns % _TURNS_PER_CHOICE == 0:
                self._choose_threads()
        return True

    def _choose_threads(self) -> None:
        wanted = self._threads.num_threads()
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
            _log.info(kv("threads follow the machine's load", threads=wanted))

    def _next_command(self) -> tuple[Future[None], Callable[[], None]] | None:
        with self._wake:
            return self._commands.popleft() if self._commands else None

    def _can_step(self) -> bool:
        return not self._paused and bool(self._batch.running or self._batch.waiting)

    def _pause(self, keep: bool) -> None:
        self._paused, self._keeps = True, keep
        if not keep:
            self._batch.clear()

    def _resume(self) -> None:
        self._paused = self._keeps = False

    def _load(self, weights: Weights, version: PolicyVersion) -> None:
        # Before the weights are touched: reading them may fail half way.
        if self._keeps:
            self._batch.outdate()
        else:
            self._batch.clear()
        if weights.folder is not None:
            read_weights(self._model, Path(weights.folder))
        elif weights.kind != "shared":
            raise EngineError(
                f"weights of kind {weights.kind!r} have no folder and are not shared; publish one of both"
            )
        self._version = version

    def _deliver(self, items: Iterable[tuple[_Live, Chunk | EngineError]]) -> None:
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Live, Chunk | EngineError]]] = defaultdict(list)
        for sequence, item in items:
            by_loop[sequence.sink.loop].append((sequence, item))
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # that loop is closed: nobody is left to read or to abort
                with self._wake:
                    for sequence, _ in batch:
                        self._post(partial(self._batch.remove, sequence))

    def _end(self, reason: str) -> None:
        """For every reader, every command and every later call. The first reason counts."""
        with self._wake:
            if self._ended:
                return
            self._ended = reason
            live, commands = list(self._live), list(self._commands)
            self._commands.clear()
            self._wake.notify()
        self._deliver((sequence, EngineError(reason)) for sequence in live)
        for done, _ in commands:
            done.set_exception(EngineError(reason))


def _put_all(batch: Sequence[tuple[_Live, Chunk | EngineError]]) -> None:
    for sequence, item in batch:
        sequence.sink.queue.put_nowait(item)
