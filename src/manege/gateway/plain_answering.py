"""The short way of a plain chat call over an engine that takes messages: one answer, whole, nothing to change in it.

It leaves the same record as `answering.py` at a fraction of the CPU time: the engine's prompt ids are compared as text
with those of earlier calls, only the new ones are parsed and kept, and the answer is the engine's own, less what the
caller did not ask for. What is not plain is left to the long way.
"""

import functools
from collections.abc import Callable
from typing import Any

import orjson

from manege.engine.base import Generation, Sampling
from manege.engine.messages import ChatAnswer, ChatIds, MessagesEngine, parse_answer
from manege.errors import EngineError
from manege.gateway.answering import Answering
from manege.gateway.capture import new_call_id
from manege.gateway.continuation import Prompt
from manege.gateway.flights import Flight
from manege.gateway.forward import upstream_body, within_context, without_tokens
from manege.gateway.message_source import MessageSource
from manege.gateway.prefixes import Known, Match, PrefixIndex, ids_text
from manege.gateway.services import Services
from manege.gateway.sources import Answer
from manege.protocols.base import ModelRequest
from manege.protocols.chat_upstream import UpstreamReply
from manege.types import CallId, Delivered, VersionSpan

__all__ = ["PlainAnswering", "is_plain"]

_PROMPT_IDS = b'"prompt_token_ids":['


def is_plain(services: Services, protocol: str, request: ModelRequest) -> bool:
    """Whether a call can go the short way."""
    return (
        services.engine.mode == "messages"
        and protocol == "chat"
        and not (request.stream or request.wants_token_ids or request.has_images or request.notes)
        and request.num_choices == 1
        and request.tool_choice in ("auto", "none")
        and request.max_tool_calls is None
        and request.json_schema is None
        and all(tool.get("type") == "function" for tool in request.raw.get("tools") or ())
    )


class PlainAnswering(Answering):
    """Gives the body of the answer."""

    async def _answer(self, flight: Flight) -> bytes:
        services, request = self.services, self.request
        created_s, call_id = services.clock(), new_call_id()
        source = await MessageSource.admit(services, self.identity, request, self._session)
        admitted, index = source.admitted, source.index
        async with services.gate.enter(self.hold_s):
            asked = _Asked(request, admitted.sampling)
            raw, engine = await services.engine.forward(asked, self._session)
        whole = _Whole(raw, request, call_id, engine, index)
        call = self._call(call_id, whole.answer(), admitted, Delivered.UNKNOWN, created_s)
        body, num_shared = whole.body(services.model_name), whole.num_shared
        remember = whole.remember(index)
        # Hundreds of objects, which the garbage collector would visit again and again while the call is stored.
        del whole, raw
        await services.store.add_continued_call(call, num_shared)
        flight.calls.append(call)
        services.counters.add("manege_prompt_tokens_total", num_shared)
        if call.flaw is None:
            remember()
        await self._count(call)
        return body


class _Asked:
    """See `pool.MessagesCall`."""

    has_begun = False

    def __init__(self, request: ModelRequest, sampling: Sampling) -> None:
        self._request, self._sampling = request, sampling

    async def run(self, engine: MessagesEngine, model: str) -> tuple[bytes, MessagesEngine]:
        """The answer, not yet read, and who gave it."""
        body = upstream_body(self._request, self._sampling, model=model)
        return await within_context(body, lambda body: engine.post(orjson.dumps(body))), engine


class _Whole:
    """A whole answer as it came, of whose prompt only the ids are read that its parent does not have."""

    def __init__(
        self, raw: bytes, request: ModelRequest, call_id: CallId, engine: MessagesEngine, index: PrefixIndex
    ) -> None:
        """Raises EngineError."""
        self._request, self._call_id, self._version = request, call_id, engine.version
        text, self._body = _read(raw, engine.url)
        self._match: Match = index.match(text)
        known = self._match.known
        self._parent: Known | None = known if known and known.is_continued_by(request.messages) else None
        if text:
            new = text[self._match.begin :] if self._parent else text
            self._body["prompt_token_ids"] = _numbers(new, engine.url)
        collected = ChatIds(engine.url)
        collected.add(self._body)
        self.ids: ChatAnswer = collected.answer()
        if self.ids.flaw is not None:
            self._parent = None
        self.num_shared = self._parent.num_tokens if self._parent else 0
        """Leading prompt tokens that the parent has."""
        self._reply = UpstreamReply(call_id=call_id)
        self._reply.read(without_tokens(self._body))

    def answer(self) -> Answer:
        """With the new ids of the prompt."""
        ids, parent = self.ids, self._parent
        has_ids = len(ids.response_ids_R) > 0
        generation = Generation(
            ids_R=ids.response_ids_R,
            logprobs_R=ids.logprobs_R,
            spans=[VersionSpan(first_token=0, version=self._version)] if has_ids else [],
            finish_reason=ids.finish_reason,
            num_cached=ids.num_cached,
        )
        return Answer(
            prompt=Prompt(
                ids=ids.prompt_ids_P,
                parent=parent.call_id if parent else None,
                new_messages=self._request.messages[parent.num_messages if parent else 0 :],
            ),
            generation=generation,
            message=self._reply.message,
            stopped_by=self._reply.stop_sequence,
            flaw=ids.flaw,
            num_prompt=ids.num_prompt,
            num_sampled=ids.num_sampled,
        )

    def remember(self, index: PrefixIndex) -> Callable[[], None]:
        """To be called when the call is stored, so that the next one can continue it."""
        ids = self.ids
        known = Known(
            call_id=self._call_id,
            num_tokens=self.num_shared + len(ids.prompt_ids_P) + len(ids.response_ids_R),
            num_messages=len(self._request.messages) + 1,
        )
        key = self._match.key_with(ids_text(ids.response_ids_R))
        return functools.partial(index.put, *key, known)

    def body(self, model: str) -> bytes:
        """The engine's answer with the recorded message, less what the caller did not ask for."""
        (choice,) = self._body["choices"][:1]
        message = dict(self._reply.message)
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        shown = {**choice, "message": message}
        shown.pop("token_ids", None)
        if not self._request.wants_logprobs:
            shown["logprobs"] = None
        answered = {**self._body, "id": f"chatcmpl-{self._call_id}", "model": model, "choices": [shown]}
        answered.pop("prompt_token_ids", None)
        return orjson.dumps(answered)


def _read(raw: bytes, url: str) -> tuple[bytes, dict[str, Any]]:
    """The prompt's ids as text without spaces, and the rest of the answer."""
    begin = raw.find(_PROMPT_IDS) + len(_PROMPT_IDS)
    end = raw.find(b"]", begin)
    text = raw[begin:end]
    # Nothing in a JSON string looks like the key, since its quotes would be escaped.
    if raw.count(_PROMPT_IDS) == 1 and text and b" " not in text and b"[" not in text:
        return text, parse_answer(raw[:begin] + raw[end:], url)
    body = parse_answer(raw, url)
    ids = body.get("prompt_token_ids")
    return (orjson.dumps(ids)[1:-1] if isinstance(ids, list) else b""), body


def _numbers(text: bytes, url: str) -> list[Any]:
    try:
        return orjson.loads(b"[%s]" % text)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"{url} answered prompt token ids that are no JSON: {error}") from error
