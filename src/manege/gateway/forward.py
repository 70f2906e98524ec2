"""A model call over an engine that takes messages: the request in chat completions' shape, the answer with its ids.

Whatever protocol the caller speaks, the engine is asked at `/v1/chat/completions`, streamed if the caller wants a
stream, with the sampling that was admitted and with what makes it tell its ids. What the engine's own settings would
choose otherwise (a model's `generation_config`) is stated, so that training samples from the policy itself.
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from manege.engine.base import Generation, Sampling
from manege.engine.messages import ChatIds, MessagesEngine
from manege.errors import ContextOverflowError
from manege.protocols.base import InvalidRequest, ModelRequest, ReplyDelta
from manege.protocols.chat_upstream import UpstreamReply, chat_body
from manege.types import FinishReason, IntArray, JsonObject, VersionSpan

__all__ = ["Forwarded", "MessagesSource", "upstream_body", "within_context", "without_tokens"]

_PASSED_ON = ("chat_template_kwargs", "mm_processor_kwargs", "reasoning_effort")
"""Fields of a caller's body that change the prompt, and that only the engine understands."""
_NOTHING = ReplyDelta()

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """One answer of an engine that takes messages."""

    prompt_ids: IntArray
    generation: Generation
    message: JsonObject
    """The canonical assistant message."""
    stop_sequence: str | None
    """The caller's stop string that ended the answer, where the engine says so."""
    texts: Sequence[str]
    """Of each sampled token, in the engine's spelling; the gateway's own tokenizer may be another one."""
    flaw: str | None
    """Why there are no ids (prompt and generation are then empty, and the call is never trained)."""
    num_prompt: int
    num_sampled: int
    """As the engine counted, also where there are no ids."""


class MessagesSource:
    """One choice of one request. `run` may be called again, on another engine, until `has_begun`."""

    def __init__(self, request: ModelRequest, *, sampling: Sampling, emit: Callable[[ReplyDelta], None]) -> None:
        """`emit` gets the parts of a streamed answer. Raises InvalidRequest for a text completion."""
        if request.prompt is not None:
            raise InvalidRequest(
                "text completions need an engine that takes token ids, and this one takes messages; "
                "use chat completions, or register the engine with mode 'tokens'"
            )
        self._request = request
        self._sampling = sampling
        self._send = emit
        self._read: tuple[MessagesEngine, ChatIds, UpstreamReply] | None = None
        self.has_begun = False
        """Whether a part of the answer was given out."""

    async def run(self, engine: MessagesEngine, model: str) -> Forwarded:
        """Ask the engine. Raises EngineError, ProtocolError, ContextOverflowError."""
        body = upstream_body(self._request, self._sampling, model=model)
        return await within_context(body, lambda body: self._ask(engine, body))

    def so_far(self) -> Forwarded | None:
        """What there is of an answer that broke off; None before its first token."""
        return self._forwarded(is_complete=False) if self.has_begun else None

    async def _ask(self, engine: MessagesEngine, body: dict[str, Any]) -> Forwarded:
        ids, reply = ChatIds(engine.url), UpstreamReply(call_id=secrets.token_hex(12))
        self._read = engine, ids, reply
        if self._request.stream:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
            async with aclosing(engine.stream(body)) as chunks:
                async for chunk in chunks:
                    ids.add(chunk)
                    self._emit(reply.read(chunk))
            forwarded = self._forwarded(is_complete=True)
            self._emit(reply.finish())
            return forwarded
        answered = await engine.ask(body)
        ids.add(answered)
        delta = reply.read(without_tokens(answered))
        forwarded = self._forwarded(is_complete=True)
        # A caller that comes back for the same answer may want it streamed.
        self._emit(delta)
        self._emit(reply.finish())
        return forwarded

    def _emit(self, delta: ReplyDelta) -> None:
        asked = replace(
            delta,
            logprobs=delta.logprobs if self._request.wants_logprobs else (),
            response_ids=delta.response_ids if self._request.wants_token_ids else (),
        )
        self.has_begun = self.has_begun or delta != _NOTHING
        if asked != _NOTHING:
            self._send(asked)

    def _forwarded(self, *, is_complete: bool) -> Forwarded:
        assert self._read is not None
        engine, ids, reply = self._read
        answer = ids.answer(is_complete=is_complete)
        ids_R = answer.response_ids_R
        return Forwarded(
            prompt_ids=answer.prompt_ids_P,
            generation=Generation(
                ids_R=ids_R,
                logprobs_R=answer.logprobs_R,
                spans=[VersionSpan(first_token=0, version=engine.version)] if len(ids_R) else [],
                finish_reason=answer.finish_reason if is_complete else FinishReason.ABORT,
                num_cached=answer.num_cached,
            ),
            message=reply.message,
            stop_sequence=reply.stop_sequence,
            texts=ids.texts() if answer.flaw is None else [],
            flaw=answer.flaw,
            num_prompt=answer.num_prompt,
            num_sampled=answer.num_sampled,
        )


def without_tokens(answered: dict[str, Any]) -> dict[str, Any]:
    """A whole answer without what is read by `ChatIds`: objects per token are costly."""
    choices = [{**choice, "logprobs": None, "token_ids": None} for choice in answered["choices"]]
    return {**answered, "choices": choices, "prompt_token_ids": None}


def upstream_body(request: ModelRequest, sampling: Sampling, *, model: str) -> dict[str, Any]:
    """What an engine is asked for a whole answer."""
    body = chat_body(request, model=model)
    for key in ("seed", "stop", *request.sampling.others):
        body.pop(key, None)
    return body | _sampling_fields(sampling) | {key: request.raw[key] for key in _PASSED_ON if key in request.raw}


async def within_context(body: dict[str, Any], ask: Callable[[dict[str, Any]], Awaitable[T]]) -> T:
    """Ask; if the limit on the answer is larger than the room that the prompt leaves, ask without one. Most engines
    refuse what ours would cut: without a limit they take the room, which is then the smaller of the two, and a prompt
    that leaves no room is refused again."""
    try:
        return await ask(body)
    except ContextOverflowError:
        return await ask({key: value for key, value in body.items() if key != "max_tokens"})


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """The fields of a chat body that fix how an answer is sampled, and make the engine return its ids."""
    fields: dict[str, Any] = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "max_tokens": sampling.max_new_tokens,
        "logprobs": True,
        "return_token_ids": True,
        "stream": False,
    }
    if sampling.stop_strings:
        fields["stop"] = list(sampling.stop_strings)
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return fields
