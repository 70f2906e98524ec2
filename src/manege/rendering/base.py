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

from manege.types import JsonObject

__all__ = ["ParsedReply", "Renderer", "ToolCall"]


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
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
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

    def encode(self, text: str) -> list[int]:
        """Plain text to ids, without special tokens added (text completions)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out."""
        ...
