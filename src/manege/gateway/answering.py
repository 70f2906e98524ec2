"""Makes the answer to one request: continue, admit, hold while paused, sample, store; as many calls as were asked for.

A call is durable before its answer is complete. One that is aborted or fails on the way is stored with what was
sampled, as not delivered.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import orjson

from manege.errors import ManegeError, StoreError
from manege.gateway.admission import Admitted
from manege.gateway.auth import AgentIdentity
from manege.gateway.capture import choice_of, new_call, new_call_id
from manege.gateway.flights import Flight
from manege.gateway.message_source import MessageSource
from manege.gateway.services import Services
from manege.gateway.sources import Answer, AnswerSource
from manege.gateway.token_source import TokenSource
from manege.logs import get_logger, kv
from manege.protocols.base import ModelReply, ModelRequest, ReplyDelta, ReplyHead
from manege.types import Call, CallId, Delivered, Event

__all__ = ["Answering"]

_log = get_logger("gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """One request on its way to an answer; called with the flight that carries it."""

    services: Services
    identity: AgentIdentity
    protocol: str
    request: ModelRequest
    thread: str
    edits: Sequence[str]
    headers: Callable[[], Sequence[tuple[str, str]]]
    hold_s: float | None
    """How long a pause may last."""

    @property
    def key(self) -> bytes:
        """Equal for requests of one attempt that ask for the same."""
        asked = {
            **self.request.raw,
            "messages": self.request.messages,
            "tools": self.request.tools,
            "stream": None,
            "attempt": (self.identity.rollout_id, self.identity.attempt, self.protocol, type(self).__name__),
        }
        return hashlib.blake2b(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()

    async def __call__(self, flight: Flight) -> ModelReply | bytes:
        """The reply, or its body. Raises what the caller is answered as an error."""
        try:
            return await self._answer(flight)
        except ManegeError as error:
            if error.status >= 500:
                _log.warning(kv("a model call failed", rollout=self.identity.rollout_id, reason=error))
                await self._note_error(error)
            raise

    async def note_lost(self) -> None:
        """Its client went away before there was an answer; what was sampled so far is a call that was not delivered."""
        try:
            await self._note("call.lost")
        except ManegeError as error:
            _log.info(kv("a lost call was not noted", rollout=self.identity.rollout_id, reason=error))

    async def _note_error(self, error: ManegeError) -> None:
        try:
            await self._note("call.error", status=error.status, message=str(error))
        except StoreError:
            self.services.flights.recorded_since_s = self.services.clock()

    async def _answer(self, flight: Flight) -> ModelReply | bytes:
        services, request = self.services, self.request
        created_s = services.clock()
        kind = MessageSource if services.engine.mode == "messages" else TokenSource
        source: AnswerSource = await kind.admit(services, self.identity, request, self._session)
        ids = [new_call_id() for _ in range(request.num_choices)]
        prompt = source.prompt
        head = ReplyHead(
            id=ids[0],
            created_s=created_s,
            model=services.model_name,
            num_prompt=len(prompt.ids) if prompt else 0,
            prompt_ids=prompt.ids.tolist() if prompt and request.wants_token_ids else None,
        )
        flight.begin(head)
        try:
            async with asyncio.TaskGroup() as group:
                made = [
                    group.create_task(self._choice(flight, index, call_id, source, created_s))
                    for index, call_id in enumerate(ids)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        answers = [task.result() for task in made]
        first = answers[0]
        return ModelReply(
            head=replace(
                head,
                num_prompt=first.num_prompt,
                prompt_ids=first.prompt.ids.tolist() if request.wants_token_ids else None,
            ),
            num_cached=max(answer.generation.num_cached for answer in answers),
            choices=[choice_of(request, answer, services.own_renderer) for answer in answers],
        )

    async def _choice(
        self, flight: Flight, index: int, call_id: CallId, source: AnswerSource, created_s: float
    ) -> Answer:
        """One answer, stored."""

        def emit(delta: ReplyDelta) -> None:
            self.services.progress.token()
            flight.emit(index, delta)

        async def keep(answer: Answer, delivered: Delivered) -> Call:
            call = self._call(call_id, answer, source.admitted, delivered, created_s)
            await self.services.store.add_call(call)
            return call

        one = source.choice(emit)
        try:
            async with self.services.gate.enter(self.hold_s):
                answer = await one.run()
            call = await keep(answer, Delivered.UNKNOWN)
        except BaseException:
            if partial := one.so_far():
                await keep(partial, Delivered.NO)
            raise
        flight.calls.append(call)
        source.add(call)
        await self._count(call)
        return answer

    def _call(
        self, call_id: CallId, answer: Answer, admitted: Admitted, delivered: Delivered, created_s: float
    ) -> Call:
        return new_call(
            call_id,
            self.request,
            answer,
            identity=self.identity,
            protocol=self.protocol,
            admitted=admitted,
            thread=self.thread,
            edits=self.edits,
            headers=self.headers,
            delivered=delivered,
            created_s=created_s,
            ended_s=self.services.clock(),
        )

    async def _count(self, call: Call) -> None:
        """A stored call, and whether its ids can be used."""
        services = self.services
        services.counters.count_call(call)
        services.progress.made()
        services.conversations.note(call)
        services.prefixes.note(call)
        if call.flaw is not None:
            services.counters.add("manege_calls_without_ids_total")
            await self._note("call.without_ids", call=call.id, message=call.flaw)

    @property
    def _session(self) -> str:
        """Calls of one session share a cache: those of one thread of an attempt."""
        return f"{self.identity.rollout_id}/{self.identity.attempt}/{self.thread}"

    async def _note(self, event_type: str, **data: object) -> None:
        event = Event(
            rollout_id=self.identity.rollout_id,
            attempt=self.identity.attempt,
            event_type=event_type,
            data={"protocol": self.protocol, "thread": self.thread, **data},
            timestamp_s=self.services.clock(),
        )
        await self.services.store.add_event(event)
