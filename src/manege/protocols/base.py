"""The canonical model request and reply that every wire protocol is translated to and from; pure, no sockets.

A protocol parses a JSON body into a `ModelRequest`, and formats a `ModelReply`, a stream of `ReplyDelta` or an error in
its own shape. What it does not know stays in `ModelRequest.raw`; what it knows and we cannot honour is refused with
InvalidRequest; what it leaves out on purpose (hosted tools) is named in `ModelRequest.notes`.

Canonical messages are those of `rendering.base`. Only where there is an image is `content` a list: OpenAI's parts,
`{"type": "text", "text": ...}` and `{"type": "image_url", "image_url": {"url": ...}}`. Canonical ids of tool calls are
`call_<letters and digits>`; a protocol with another prefix (`toolu_`) writes its own and reads it back to ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from manege.errors import ManegeError, ProtocolError
from manege.types import FinishReason, JsonObject

__all__ = [
    "AskedSampling",
    "Choice",
    "InvalidRequest",
    "ModelReply",
    "ModelRequest",
    "ReplyDelta",
    "ReplyHead",
    "ReplyStream",
    "ServedModel",
    "TokenLogprob",
    "ToolChoice",
    "WireProtocol",
]

ToolChoice = Literal["auto", "none", "required"]


class InvalidRequest(ProtocolError):
    """A body that its protocol does not allow, or that asks for something that we do not do."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The field that is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSampling:
    """What the caller asked for; None where it said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    max_new_tokens: int | None = None
    others: JsonObject = field(default_factory=dict)
    """Settings that no engine of ours has (penalties, logit_bias, min_p), where they would change something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model call, whatever its protocol."""

    messages: Sequence[JsonObject] = ()
    """Canonical; empty for a text completion."""
    tools: Sequence[JsonObject] = ()
    """`{"type": "function", "function": {name, description, parameters, strict}}`."""
    tool_choice: ToolChoice = "auto"
    forced_tool: str | None = None
    """The name of the one tool that must be called; then `tool_choice` is `required`."""
    max_tool_calls: int | None = None
    """Tool calls beyond this are not answered (no parallel calls: 1); None: any number."""
    json_schema: JsonObject | None = None
    """What the answer must match; {}: any JSON object."""
    prompt: str | Sequence[int] | None = None
    """Of a text completion: text or token ids; None for a chat."""
    sampling: AskedSampling
    num_choices: int = 1
    stream: bool = False
    wants_usage: bool = True
    """Whether a stream ends with token counts, where the protocol lets the caller choose."""
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    notes: Sequence[str] = ()
    """What was left out of the caller's request, one line each."""
    raw: JsonObject
    """The whole body."""

    @property
    def is_constrained(self) -> bool:
        """Whether an engine may not say what it would."""
        return self.json_schema is not None or self.tool_choice == "required"

    @property
    def has_images(self) -> bool:
        """Whether a message holds more than text."""
        return any(isinstance(message["content"], list) for message in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token for callers that asked for log-probabilities."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer to a request."""

    message: JsonObject
    """Chat: the canonical assistant message. Text completion: `{"text": ...}`."""
    finish_reason: FinishReason
    stop_sequence: str | None = None
    """The caller's stop string that ended the answer; it is not part of the text."""
    num_sampled: int
    logprobs: Sequence[TokenLogprob] = ()
    """Empty unless asked for."""
    response_ids: Sequence[int] | None = None
    """None unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What is known before the first token."""

    id: str
    """Of the (first) call; a protocol puts its own prefix before it."""
    created_s: float
    model: str
    num_prompt: int
    """0: not known yet."""
    prompt_ids: Sequence[int] | None = None
    """None unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """The whole answer to a ModelRequest."""

    head: ReplyHead
    num_cached: int
    """Prompt tokens that the engine did not have to compute again."""
    choices: Sequence[Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDelta:
    """What one or more new tokens add to an answer; the sum of all deltas of a choice is its message, exactly."""

    reasoning: str = ""
    content: str = ""
    """Also the text of a text completion."""
    tool_calls: Sequence[JsonObject] = ()
    """Whole canonical calls, with their ids: a call is sent when it is closed, since one that is cut is text."""
    logprobs: Sequence[TokenLogprob] = ()
    """Of the tokens, if asked for; they may run ahead of the text."""
    response_ids: Sequence[int] = ()
    """The tokens, if asked for."""


class ReplyStream(Protocol):
    """One streamed answer as bytes of its protocol: `start`, any number of `delta` and `heartbeat`, then `finish` or
    `error`, once. Everything that was opened is closed by `finish`."""

    media_type: str

    def start(self) -> bytes:
        """The opening events."""
        ...

    def heartbeat(self) -> bytes:
        """Something that keeps clients waiting: a comment for chat, `ping` for Messages, `response.in_progress`."""
        ...

    def delta(self, choice: int, delta: ReplyDelta) -> bytes:
        """What `delta` adds to the answer number `choice`."""
        ...

    def finish(self, reply: ModelReply) -> bytes:
        """The closing events; `reply` is the whole answer, whose text was sent already."""
        ...

    def error(self, error: ManegeError) -> bytes:
        """The answer ends in an error instead."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What model lists say."""

    id: str
    context_limit: int
    """Tokens of prompt + answer."""
    created_s: float = 0.0


class WireProtocol(Protocol):
    """Implementations: chat, completions, responses, anthropic, gemini."""

    name: str
    """As in `Call.protocol`."""

    def parse(self, raw: JsonObject) -> ModelRequest:
        """`raw`: the body. Raises InvalidRequest."""
        ...

    def reply(self, request: ModelRequest, reply: ModelReply) -> JsonObject:
        """The body of a 200."""
        ...

    def stream(self, request: ModelRequest, head: ReplyHead) -> ReplyStream:
        """The same answer, streamed."""
        ...

    def error(self, error: ManegeError) -> JsonObject:
        """The body of an error; the status is `error.status`."""
        ...

    def token_count(self, num_prompt: int) -> JsonObject:
        """The answer of the protocol's token counting endpoint; only Messages and Gemini have one."""
        ...

    def models(self, models: Sequence[ServedModel]) -> JsonObject:
        """The list of models."""
        ...

    def model(self, model: ServedModel) -> JsonObject:
        """One model."""
        ...
