"""Answers of an engine that takes token ids: the gateway continues the sampled ids, and parses what comes."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Self

import numpy as np
import orjson

from manege.engine.base import Chunk, Constraint
from manege.errors import EngineError
from manege.gateway.admission import Admitted, admit
from manege.gateway.auth import AgentIdentity
from manege.gateway.capture import Capture
from manege.gateway.continuation import Conversation, Prompt
from manege.gateway.services import Services
from manege.gateway.sources import Answer
from manege.gateway.watchdog import Progress
from manege.protocols.base import InvalidRequest, ModelRequest, ReplyDelta
from manege.rendering.base import Renderer
from manege.types import Call, FinishReason, JsonObject

__all__ = ["TokenSource", "constraint_of", "prompt_of"]


class TokenSource:
    """See `sources.AnswerSource`."""

    def __init__(
        self,
        services: Services,
        request: ModelRequest,
        conversation: Conversation,
        prompt: Prompt,
        admitted: Admitted,
        session: str,
    ) -> None:
        self.prompt, self.admitted = prompt, admitted
        self._services, self._request, self._conversation = services, request, conversation
        self._session = session
        self._ids = prompt.ids.tolist()

    @classmethod
    async def admit(cls, services: Services, identity: AgentIdentity, request: ModelRequest, session: str) -> Self:
        """Find what the request continues. Raises ProtocolError, ContextOverflowError."""
        setting = await services.settings.of(identity.rollout.spec.run)
        conversation = await services.conversations.here(identity.rollout_id, identity.attempt)
        prompt = prompt_of(request, conversation, services.renderer)
        # Where the last answer in it is one that was given here, nobody else has a later one.
        if any(message["role"] == "assistant" for message in prompt.new_messages) and (
            await services.conversations.catch_up(identity.rollout_id, identity.attempt)
        ):
            prompt = prompt_of(request, conversation, services.renderer)
        admitted = admit(
            request.sampling,
            spec=identity.rollout.spec,
            limits=setting.sampling,
            num_prompt=len(prompt.ids),
            context_limit=services.context_limit,
            stop_ids=services.renderer.stop_ids,
            constraint=constraint_of(request, prompt, services.renderer),
        )
        return cls(services, request, conversation, prompt, admitted, session)

    def choice(self, emit: Callable[[ReplyDelta], None]) -> "_TokenAnswer":
        capture = Capture(self._request, self._ids, self._services.renderer)
        sampling = self.admitted.sampling
        chunks = self._services.engine.generate(self._ids, sampling, self._session)
        return _TokenAnswer(chunks, capture, self.prompt, emit, self._services.progress)

    def add(self, call: Call) -> None:
        if self._request.prompt is None:
            self._conversation.add(call)


class _TokenAnswer:
    def __init__(
        self,
        chunks: AsyncGenerator[Chunk, None],
        capture: Capture,
        prompt: Prompt,
        emit: Callable[[ReplyDelta], None],
        progress: Progress,
    ) -> None:
        self._chunks, self._capture, self._prompt, self._emit = chunks, capture, prompt, emit
        self._progress = progress

    async def run(self) -> Answer:
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is FinishReason.ABORT:
                    raise EngineError("the engine aborted the answer; see its log")
                # A delta may come much later, when a whole tool call has been read.
                self._progress.token()
                self._tell(self._capture.add(chunk))
        self._tell(self._capture.finish())
        return self._answer(aborted=False)

    def so_far(self) -> Answer | None:
        return self._answer(aborted=True) if self._capture.collector.ids else None

    def _tell(self, delta: ReplyDelta | None) -> None:
        if delta is not None:
            self._emit(delta)

    def _answer(self, *, aborted: bool) -> Answer:
        generation = self._capture.collector.generation(aborted=aborted)
        return Answer(
            prompt=self._prompt,
            generation=generation,
            message=self._capture.message(),
            stopped_by=self._capture.stopped_by,
            num_prompt=len(self._prompt.ids),
            num_sampled=len(generation.ids_R),
        )


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
    if request.tool_choice != "required" and request.json_schema is None:
        return None
    ids = prompt.ids.tolist()
    if request.tool_choice == "required":
        grammar = renderer.tool_grammar(ids, _offered(request), max_calls=request.max_tool_calls)
        if grammar is None:
            raise InvalidRequest(
                "tool_choice asks for a tool call, but the form of this model's tool calls is not known; send 'auto'",
                param="tool_choice",
            )
        return Constraint(grammar=grammar)
    assert request.json_schema is not None
    tools = request.tools if request.tool_choice == "auto" else ()
    return Constraint(
        grammar=renderer.json_grammar(ids, request.json_schema, tools=tools, max_calls=request.max_tool_calls),
        json_schema=None if tools else orjson.dumps(request.json_schema).decode(),
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
