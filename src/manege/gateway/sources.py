"""Where the answers to one request come from: an engine that takes token ids, or one that takes messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from manege.engine.base import Generation
from manege.gateway.admission import Admitted
from manege.gateway.continuation import Prompt
from manege.protocols.base import ReplyDelta
from manege.types import Call, JsonObject

__all__ = ["Answer", "AnswerSource", "OneAnswer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was sampled for one choice, whole or as far as it came."""

    prompt: Prompt
    generation: Generation
    message: JsonObject
    """The canonical message, or `{"text": ...}` of a text completion."""
    stopped_by: str | None = None
    """The caller's stop string that ended it."""
    texts: Sequence[str] | None = None
    """Of each sampled token, where the engine said them."""
    flaw: str | None = None
    """Why an engine's ids cannot be used; then prompt and generation have none, and the call is never trained."""
    num_prompt: int
    num_sampled: int
    """As the engine counted, also where there are no ids."""


class OneAnswer(Protocol):
    """One choice on its way."""

    async def run(self) -> Answer:
        """Sample it. Raises EngineError and what else the caller is told."""
        ...

    def so_far(self) -> Answer | None:
        """What was sampled of one that broke off; None: nothing."""
        ...


class AnswerSource(Protocol):
    """Makes the choices of one request."""

    @property
    def admitted(self) -> Admitted:
        """How it is sampled."""
        ...

    @property
    def prompt(self) -> Prompt | None:
        """None: known only with the answer."""
        ...

    def choice(self, emit: Callable[[ReplyDelta], None]) -> OneAnswer:
        """`emit` gets the parts of the answer as they come."""
        ...

    def add(self, call: Call) -> None:
        """A stored call, which the next request may continue."""
        ...
