"""verl's inference servers as an engine of the gateway: token ids in, token ids and log-probabilities out.

Calls go through verl's client, never to its servers' HTTP: only the client's calls wait at the door that verl closes
while weights change. verl itself decides when that is; so there is nothing to pause or to load here.

The client of verl's asynchronous trainers continues what an update aborted by itself, and then tells only the first and
the last version. Here each part is asked for by itself (`PartialAnswer`), so that every token has its version: verl's
global step.

A conversation stays at one server, whose cache has its beginning: verl's balancer sends equal request ids to the same
one, and a prompt that begins with all of an earlier answer gets the earlier id.
"""
# pyright: reportMissingImports=false

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from manege.engine.base import Chunk, EngineCapabilities, EngineInfo, Sampling, Weights
from manege.engine.partial import PartialAnswer
from manege.errors import ContextOverflowError, EngineError, ProtocolError
from manege.types import FinishReason, IntArray, PolicyVersion

__all__ = ["ClientEngine", "Conversations"]

_AFTER_ABORT_S = 0.5
"""Until the request for the rest: new weights are on their way."""
_MAX_CONVERSATIONS = 2048
"""More than run at once."""


class ClientEngine:
    """Implements Engine over verl's `LLMServerClient`."""

    capabilities = EngineCapabilities(inflight=frozenset({"abort_continue"}), weights=frozenset())

    def __init__(self, client: Any, *, model: str, context_limit: int) -> None:
        """`client`: what verl gives its agent-loop manager."""
        self._client, self._model, self._context_limit = client, model, context_limit
        self._version = PolicyVersion(0)
        self._num_running = 0
        self._conversations = Conversations()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """See Engine: a chunk is what came between two updates of the weights."""
        if sampling.constraint is not None:
            raise ProtocolError(
                "answers of a given form (a forced tool, a JSON schema) cannot be had through verl's client; "
                "leave tool_choice at auto and ask for plain text"
            )
        room = self._context_limit - len(prompt_ids)
        if room < 1:
            raise ContextOverflowError(
                f"the prompt has {len(prompt_ids)} tokens and the context {self._context_limit}; shorten the prompt"
            )
        answer = PartialAnswer(prompt_ids, replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)))
        conversation = self._conversations.find(np.asarray(prompt_ids, np.int32))
        self._num_running += 1
        try:
            while True:
                ids, part = answer.request()
                sampled, end = await self._part(conversation, ids, part)
                for chunk in (*answer.add(sampled), *answer.add(end)):
                    yield chunk
                answer.end_request(by_pause=True)
                if answer.is_whole:
                    self._conversations.put(conversation, np.asarray([*ids, *sampled.ids], np.int32))
                    return
                await asyncio.sleep(_AFTER_ABORT_S)
        finally:
            self._num_running -= 1

    async def pause(self, *, keep: bool = False) -> None:
        """Nothing: verl holds its own servers."""

    async def resume(self) -> None:
        """Nothing, as `pause`."""

    async def load(self, weights: Weights, version: PolicyVersion) -> None:
        """See Engine; always an EngineError."""
        raise EngineError("verl's servers get their weights from verl's trainer only; train with `verl`, not `manege`")

    async def info(self) -> EngineInfo:
        """The version is that of the last answer."""
        return EngineInfo(
            model=self._model,
            context_limit=self._context_limit,
            version=self._version,
            num_running=self._num_running,
        )

    async def close(self) -> None:
        """Nothing: the servers are verl's."""

    async def _part(self, conversation: str, ids: Sequence[int], sampling: Sampling) -> tuple[Chunk, Chunk]:
        """What was sampled until the answer ended or weights changed, and that end."""
        from verl.workers.rollout.llm_server import LLMServerClient

        try:
            # The base class's: what subclasses add is that they continue what was aborted.
            output = await LLMServerClient.generate(
                self._client, conversation, prompt_ids=list(ids), sampling_params=_params(sampling)
            )
        except Exception as error:  # of verl, Ray or the server behind both: no class in common
            raise EngineError(f"verl's rollout server failed: {type(error).__name__}: {error}") from error
        sampled, logprobs = list(output.token_ids), list(output.log_probs or ())
        if len(sampled) != len(logprobs):
            raise EngineError(
                f"verl's rollout server gave {len(sampled)} tokens and {len(logprobs)} log-probabilities; "
                "set actor_rollout_ref.rollout.calculate_log_probs=True"
            )
        self._version = PolicyVersion(int(output.extra_fields.get("global_steps") or 0))
        num_cached = int(output.extra_fields.get("num_cached_tokens") or 0)
        end = _finish(sampled, output.stop_reason, sampling)
        return (
            Chunk(ids=sampled, logprobs=logprobs, version=self._version),
            Chunk(ids=(), logprobs=(), version=self._version, finish_reason=end, num_cached=num_cached),
        )


class Conversations:
    """The ids by which verl's balancer knows conversations, found again by their tokens."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, IntArray] = OrderedDict()
        """All tokens of each, up to its last answer; the one used last comes last."""

    def find(self, prompt_ids: IntArray) -> str:
        """Of the longest one that the prompt continues, or a new id."""

        def is_continued(ids: IntArray) -> bool:
            size = len(ids)
            return size < len(prompt_ids) and ids[-1] == prompt_ids[size - 1] and bool((ids == prompt_ids[:size]).all())

        found = [(len(ids), name) for name, ids in self._known.items() if is_continued(ids)]
        return max(found)[1] if found else uuid.uuid4().hex

    def put(self, name: str, ids: IntArray) -> None:
        """An answer of a conversation has ended. Those that were silent for longest are forgotten."""
        self._known[name] = ids
        self._known.move_to_end(name)
        if len(self._known) > _MAX_CONVERSATIONS:
            self._known.popitem(last=False)


def _params(sampling: Sampling) -> dict[str, Any]:
    """As vLLM and SGLang name them, as far as verl gives them on."""
    params: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": sorted(sampling.stop_ids),
        "logprobs": True,
    }
    if sampling.stop_strings:
        params |= {"stop": list(sampling.stop_strings), "include_stop_str_in_output": True}
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return params


def _finish(ids: Sequence[int], reason: str | None, sampling: Sampling) -> FinishReason:
    """verl says `completed` for stop and length alike."""
    if reason in ("aborted", "abort"):
        return FinishReason.ABORT
    if reason == "length":
        return FinishReason.LENGTH
    is_full = len(ids) >= sampling.max_new_tokens and not (ids and ids[-1] in sampling.stop_ids)
    return FinishReason.LENGTH if is_full else FinishReason.STOP
