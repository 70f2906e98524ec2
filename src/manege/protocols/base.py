"""The canonical model request and reply that every wire protocol is translated to and from; pure, no sockets.

A protocol parses a JSON body into a `ModelRequest`, and formats a `ModelReply` or an error in its own shape. What it
does not know stays in `ModelRequest.raw`; what it knows and we cannot honour is refused with InvalidRequest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from manege.errors import ManegeError, ProtocolError
from manege.types import FinishReason, JsonObject

__all__ = ["AskedSampling", "InvalidRequest", "ModelReply", "ModelRequest", "TokenLogprob", "WireProtocol"]


class InvalidRequest(ProtocolError):
    """A body that its protocol does not allow, or that asks for something that we do not do."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The field that is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSampling:
    """What the caller asked for; None where it said nothing."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: Sequence[str]
    max_new_tokens: int | None
    others: JsonObject
    """Settings that no engine of ours has (penalties, logit_bias, min_p), where they would change something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model call, whatever its protocol."""

    messages: Sequence[JsonObject] = ()
    """Canonical (see `rendering.base`); empty for a text completion."""
    tools: Sequence[JsonObject] = ()
    """`{"type": "function", "function": {name, description, parameters}}`."""
    max_tool_calls: int | None = None
    """Tool calls beyond this are not answered; 0: none wanted; None: any number."""
    prompt: str | Sequence[int] | None = None
    """Of a text completion: text or token ids; None for a chat."""
    sampling: AskedSampling
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    raw: JsonObject
    """The whole body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token for callers that asked for log-probabilities."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """The answer to a ModelRequest."""

    id: str
    created_s: float
    model: str
    message: JsonObject
    """Chat: the canonical assistant message. Text completion: `{"text": ...}`."""
    finish_reason: FinishReason
    num_prompt: int
    num_sampled: int
    num_cached: int
    """Prompt tokens that the engine did not have to compute again."""
    logprobs: Sequence[TokenLogprob] = field(default_factory=list)
    """Empty unless asked for."""
    prompt_ids: Sequence[int] | None = None
    response_ids: Sequence[int] | None = None
    """None unless asked for."""


class WireProtocol(Protocol):
    """Implementations: chat, completions."""

    name: str
    """As in `Call.protocol`."""

    def parse(self, raw: JsonObject) -> ModelRequest:
        """`raw`: the body. Raises InvalidRequest."""
        ...

    def reply(self, reply: ModelReply) -> JsonObject:
        """The body of a 200."""
        ...

    def error(self, error: ManegeError) -> JsonObject:
        """The body of an error; the status is `error.status`."""
        ...
