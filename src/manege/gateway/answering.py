"""Makes the answer to one request: continue, admit, hold while paused, sample, store; as many calls as were asked for.

A call is durable before its answer is complete. One that is aborted or fails on the way is stored with what was
sampled, as not delivered.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import orjson

from manege.engine.base import Constraint
from manege.errors import EngineError, ManegeError
from manege.gateway.admission import Admitted, admit
from manege.gateway.auth import AgentIdentity
from manege.gateway.capture import Capture, choice_of, new_call, new_call_id
from manege.gateway.continuation import Conversation, Prompt
from manege.gateway.flights import Flight
from manege.gateway.services import Services
from manege.logs import get_logger, kv
from manege.protocols.base import Choice, InvalidRequest, ModelReply, ModelRequest, ReplyHead
from manege.rendering.base import Renderer
from manege.types import Call, CallId, Delivered, Event, FinishReason, JsonObject

__all__ = ["Answering", "constraint_of", "prompt_of"]

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
            "attempt": (self.identity.rollout_id, self.identity.attempt, self.protocol),
        }
        return hashlib.blake2b(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()

    async def __call__(self, flight: Flight) -> ModelReply:
        """Raises what the caller is answered as an error."""
        try:
            return await self._answer(flight)
        except ManegeError as error:
            if error.status >= 500:
                await self._note_error(error)
            raise

    async def _answer(self, flight: Flight) -> ModelReply:
        services, request = self.services, self.request
        created_s = services.clock()
        setting = await services.settings.of(self.identity.rollout.spec.run)
        conversation = await services.conversations.of(self.identity.rollout_id, self.identity.attempt)
        prompt = prompt_of(request, conversation, services.renderer)
        admitted = admit(
            request.sampling,
            spec=self.identity.rollout.spec,
            limits=setting.sampling,
            num_prompt=len(prompt.ids),
            context_limit=services.context_limit,
            stop_ids=services.renderer.stop_ids,
            constraint=constraint_of(request, prompt, services.renderer),
        )
        ids = [new_call_id() for _ in range(request.num_choices)]
        head = ReplyHead(
            id=ids[0],
            created_s=created_s,
            model=services.model_name,
            num_prompt=len(prompt.ids),
            prompt_ids=prompt.ids.tolist() if request.wants_token_ids else None,
        )
        flight.begin(head)
        try:
            async with asyncio.TaskGroup() as group:
                made = [
                    group.create_task(self._choice(flight, index, call_id, prompt, admitted, conversation, created_s))
                    for index, call_id in enumerate(ids)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        answers = [task.result() for task in made]
        return ModelReply(
            head=head,
            num_cached=max(num_cached for _, num_cached in answers),
            choices=[choice for choice, _ in answers],
        )

    async def _choice(
        self,
        flight: Flight,
        index: int,
        call_id: CallId,
        prompt: Prompt,
        admitted: Admitted,
        conversation: Conversation,
        created_s: float,
    ) -> tuple[Choice, int]:
        """One answer, stored, and how many of its prompt tokens were cached."""
        services = self.services
        capture = Capture(self.request, prompt, services.renderer)

        async def keep(*, aborted: bool) -> Call:
            generation = capture.collector.generation(aborted=aborted)
            call = new_call(
                call_id,
                self.request,
                prompt,
                generation,
                capture.message(),
                identity=self.identity,
                protocol=self.protocol,
                admitted=admitted,
                thread=self.thread,
                edits=self.edits,
                headers=self.headers,
                delivered=Delivered.NO if aborted else Delivered.UNKNOWN,
                created_s=created_s,
                ended_s=services.clock(),
            )
            await services.store.add_call(call)
            return call

        try:
            async with services.gate.enter(self.hold_s):
                chunks = services.engine.generate(prompt.ids.tolist(), admitted.sampling)
                async with aclosing(chunks):
                    async for chunk in chunks:
                        if chunk.finish_reason is FinishReason.ABORT:
                            raise EngineError("the engine aborted the answer; see its log")
                        if delta := capture.add(chunk):
                            flight.emit(index, delta)
            if delta := capture.finish():
                flight.emit(index, delta)
            call = await keep(aborted=False)
        except BaseException:
            if capture.collector.ids:
                await keep(aborted=True)
            raise
        flight.calls.append(call)
        if self.request.prompt is None:
            conversation.add(call)
        services.counters.count_call(call)
        choice = choice_of(self.request, call, capture.stopped_by, services.renderer)
        return choice, capture.collector.generation().num_cached

    async def _note_error(self, error: ManegeError) -> None:
        _log.warning(kv("a model call failed", rollout=self.identity.rollout_id, reason=error))
        event = Event(
            rollout_id=self.identity.rollout_id,
            attempt=self.identity.attempt,
            event_type="call.error",
            data={"protocol": self.protocol, "thread": self.thread, "status": error.status, "message": str(error)},
            timestamp_s=self.services.clock(),
        )
        await self.services.store.add_event(event)


def prompt_of(request: ModelRequest, conversation: Conversation, renderer: Renderer) -> Prompt:
    """The ids to sample from. Raises ProtocolError."""
    if request.has_images:
        raise InvalidRequest("the messages hold images, but this model reads text only; leave them out")
    if request.prompt is None:
        return conversation.prompt(request, renderer)
    ids = renderer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
    unknown = [token for token in ids if token >= renderer.vocab_size]
    if unknown:
        raise InvalidRequest(
            f"prompt holds token id {unknown[0]}, but the model's ids are below {renderer.vocab_size}", param="prompt"
        )
    return Prompt(ids=np.asarray(ids, np.int32), parent=None, new_messages=())


def constraint_of(request: ModelRequest, prompt: Prompt, renderer: Renderer) -> Constraint | None:
    """What the answer must look like: a required tool call, or JSON. Raises InvalidRequest."""
    ids = prompt.ids.tolist()
    if request.tool_choice == "required":
        grammar = renderer.tool_grammar(ids, _offered(request), max_calls=request.max_tool_calls)
        if grammar is None:
            raise InvalidRequest(
                "tool_choice asks for a tool call, but the form of this model's tool calls is not known; send 'auto'",
                param="tool_choice",
            )
        return Constraint(grammar=grammar)
    if request.json_schema is None:
        return None
    return Constraint(
        grammar=renderer.json_grammar(ids, request.json_schema),
        json_schema=orjson.dumps(request.json_schema).decode(),
    )


def _offered(request: ModelRequest) -> Sequence[JsonObject]:
    if request.forced_tool is None:
        offered = request.tools
    else:
        offered = [tool for tool in request.tools if tool["function"]["name"] == request.forced_tool]
    if not offered:
        named = "a tool call" if request.forced_tool is None else f"tool {request.forced_tool!r}"
        raise InvalidRequest(f"tool_choice asks for {named}, which is not among the tools", param="tool_choice")
    return offered
