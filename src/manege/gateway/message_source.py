"""Answers of an engine that takes messages: its own ids are recorded, and matched to earlier calls by their prefix."""

from collections.abc import Callable
from dataclasses import replace
from typing import Self

from manege.gateway.admission import Admitted, admit
from manege.gateway.auth import AgentIdentity
from manege.gateway.continuation import Prompt
from manege.gateway.forward import Forwarded, MessagesSource
from manege.gateway.prefixes import Known, PrefixIndex
from manege.gateway.services import Services
from manege.gateway.sources import Answer
from manege.protocols.base import ModelRequest, ReplyDelta
from manege.types import Call, CallId, FinishReason

__all__ = ["MessageSource"]

_UNKNOWN_LIMIT = 2**31
"""The engine knows its context, the gateway does not."""


class MessageSource:
    """See `sources.AnswerSource`."""

    prompt = None

    def __init__(
        self, services: Services, request: ModelRequest, index: PrefixIndex, admitted: Admitted, session: str
    ) -> None:
        self.admitted = admitted
        self._services, self._request, self._session = services, request, session
        self.index = index
        """What the request may continue."""
        self._parents: dict[CallId, Known] = {}

    @classmethod
    async def admit(cls, services: Services, identity: AgentIdentity, request: ModelRequest, session: str) -> Self:
        """Nothing is refused here: what the request continues and whether it fits is known to the engine."""
        setting = await services.settings.of(identity.rollout.spec.run)
        admitted = admit(
            request.sampling,
            spec=identity.rollout.spec,
            limits=setting.sampling,
            num_prompt=0,
            context_limit=_UNKNOWN_LIMIT,
            stop_ids=frozenset(),
        )
        index = await services.prefixes.of(identity.rollout_id, identity.attempt)
        return cls(services, request, index, admitted, session)

    def choice(self, emit: Callable[[ReplyDelta], None]) -> "_ForwardedAnswer":
        source = MessagesSource(self._request, sampling=self.admitted.sampling, emit=emit)
        return _ForwardedAnswer(self, source)

    def add(self, call: Call) -> None:
        if len(call.response_ids_R):
            self.index.add(call, self._parents.get(call.parent) if call.parent else None)

    async def forward(self, source: MessagesSource) -> Forwarded:
        """One engine after the other, as the pool decides."""
        return await self._services.engine.forward(source, self._session)

    def answer(self, forwarded: Forwarded) -> Answer:
        """With the call that it continues."""
        parent = self.index.parent(forwarded.prompt_ids, self._request.messages)
        if parent is not None:
            self._parents[parent.call_id] = parent
        return Answer(
            prompt=Prompt(
                ids=forwarded.prompt_ids,
                parent=parent.call_id if parent else None,
                new_messages=self._request.messages[parent.num_messages if parent else 0 :],
            ),
            generation=forwarded.generation,
            message=forwarded.message,
            stopped_by=forwarded.stop_sequence,
            texts=forwarded.texts,
            flaw=forwarded.flaw,
            num_prompt=forwarded.num_prompt,
            num_sampled=forwarded.num_sampled,
        )


class _ForwardedAnswer:
    def __init__(self, owner: MessageSource, source: MessagesSource) -> None:
        self._owner, self._source = owner, source

    async def run(self) -> Answer:
        return self._owner.answer(await self._owner.forward(self._source))

    def so_far(self) -> Answer | None:
        forwarded = self._source.so_far()
        if forwarded is None:
            return None
        generation = replace(forwarded.generation, finish_reason=FinishReason.ABORT)
        return self._owner.answer(replace(forwarded, generation=generation))
