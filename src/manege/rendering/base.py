"""Messages to token ids and back; pure, no sockets, no torch.

`render` gives the ids of a whole conversation, ending where the assistant's answer begins. `bridge` gives the ids that
follow `prompt + response` when a harness sends the next turn: only what is new is tokenised, the sampled ids stay as
they were. It returns None when the chat template would render the earlier turns differently (for example, drops
reasoning), because then the context truly changes.

Messages are canonical: dicts of the OpenAI chat shape with `role` and string `content`, `tool_calls` with
`function.name` and `function.arguments` (a JSON string), `tool_call_id` for role `tool`, `reasoning_content` where
there is reasoning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from manege.types import IntArray, JsonObject

__all__ = ["LiveParser", "ParsedReply", "Renderer", "ToolCall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call that the model wrote."""

    name: str
    arguments: str
    """JSON text; what the model wrote, even if it does not parse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """What sampled ids mean."""

    content: str
    reasoning: str | None
    tool_calls: Sequence[ToolCall]


class LiveParser(Protocol):
    """Parses one answer while it is sampled. What it has given out is never taken back: for every way of cutting the
    ids into chunks, the sum of what `feed` and `finish` return is what `Renderer.parse` says of all ids."""

    def feed(self, ids: Sequence[int]) -> ParsedReply:
        """What these ids add, as far as it is certain: text that may still become a tag, part of a character or of a
        stop string, or space that would be trimmed, is kept back. A tool call is returned once, when it is closed."""
        ...

    def finish(self) -> ParsedReply:
        """The rest, at the end of the answer."""
        ...

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text so far; it and what follows it are not part of the message."""
        ...


class Renderer(Protocol):
    """Implementations: known (the `renderers` library), generic (a Jinja chat template and `tokenizers`)."""

    stop_ids: frozenset[int]
    """Tokens that end an assistant turn."""
    vocab_size: int
    """Every id is below it."""

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[int]:
        """Raises ProtocolError when the template refuses the messages."""
        ...

    def bridge(
        self,
        history: Sequence[JsonObject],
        prompt_ids: Sequence[int] | IntArray,
        response_ids: Sequence[int] | IntArray,
        new_messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        """Ids to append to `prompt_ids + response_ids`; `history` includes the assistant message of the response."""
        ...

    def parse(
        self, response_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Sequence[JsonObject] = ()
    ) -> ParsedReply:
        """Never raises: text that is not a well-formed tool call, or any text when there are no tools, is content."""
        ...

    def live_parser(
        self, *, prompt_ids: Sequence[int] = (), tools: Sequence[JsonObject] = (), stop: Sequence[str] = ()
    ) -> LiveParser:
        """`parse`, bit by bit; the text ends before the first of the `stop` strings."""
        ...

    def live_text(self, *, stop: Sequence[str] = ()) -> LiveParser:
        """`decode`, bit by bit, for text completions: all text is content."""
        ...

    def tool_grammar(
        self, prompt_ids: Sequence[int], tools: Sequence[JsonObject], *, max_calls: int | None
    ) -> str | None:
        """A Lark grammar (llguidance's dialect) of an answer that calls one or more of `tools`, with arguments that
        match their schemas, in the model's own form; None where that form is not known."""
        ...

    def json_grammar(
        self,
        prompt_ids: Sequence[int],
        json_schema: JsonObject,
        *,
        tools: Sequence[JsonObject] = (),
        max_calls: int | None = None,
    ) -> str:
        """The same for an answer that is JSON, or calls of `tools` where there are any."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text to ids, without special tokens added (text completions)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out."""
        ...
