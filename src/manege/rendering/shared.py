"""What the renderers share: everything that needs no more than a tokenizer and the form of tool calls."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer

from manege.rendering.base import LiveParser, ParsedReply
from manege.rendering.form import CallForm, read_form
from manege.rendering.grammar import GrammarWriter
from manege.rendering.reply import THINK, THINK_END
from manege.rendering.text import Detokeniser, LiveText, whole_reply
from manege.types import JsonObject

__all__ = ["TokenizerRenderer"]

_NUM_LAST = 8
"""Tokens at the end of a prompt that may open or close a thought, with the new lines behind."""


class TokenizerRenderer(ABC):
    """Implementations: known and generic. See `rendering.base.Renderer`."""

    stop_ids: frozenset[int]

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._special = {index: token.content for index, token in added.items() if token.special}
        # llguidance goes by the looks of a token too.
        self._grammars = GrammarWriter(
            {
                content: index
                for index, content in self._added.items()
                if index in self._special or (content.startswith("<") and content.endswith(">"))
            }
        )

    @abstractmethod
    def _text(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], answer: bool) -> str:
        """See `form.RenderText`."""

    @cached_property
    def _form(self) -> CallForm | None:
        """How the model writes tool calls; None: not known."""
        return read_form(self._text, [self._added[index] for index in self.stop_ids if index in self._added])

    @abstractmethod
    def live_parser(
        self, *, prompt_ids: Sequence[int] = (), tools: Sequence[JsonObject] = (), stop: Sequence[str] = ()
    ) -> LiveParser: ...

    def parse(
        self, response_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Sequence[JsonObject] = ()
    ) -> ParsedReply:
        return whole_reply(self.live_parser(prompt_ids=prompt_ids, tools=tools), response_ids)

    def live_text(self, *, stop: Sequence[str] = ()) -> LiveParser:
        return LiveText(Detokeniser(self._tokenizer, self._special), stop)

    def tool_grammar(
        self, prompt_ids: Sequence[int], tools: Sequence[JsonObject], *, max_calls: int | None
    ) -> str | None:
        if self._form is None:
            return None
        return self._grammars.tool_calls(self._form, tools, max_calls=max_calls, opened=self._opened(prompt_ids))

    def json_grammar(
        self,
        prompt_ids: Sequence[int],
        json_schema: JsonObject,
        *,
        tools: Sequence[JsonObject] = (),
        max_calls: int | None = None,
    ) -> str:
        opened = self._opened(prompt_ids)
        return self._grammars.json(json_schema, form=self._form, tools=tools, max_calls=max_calls, opened=opened)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return whole_reply(self.live_text(), ids).content

    def _opened(self, prompt_ids: Sequence[int]) -> str | None:
        """The tag of a thought with which the prompt ends, if it does."""
        end = self._tokenizer.decode(list(prompt_ids[-_NUM_LAST:]), skip_special_tokens=False).rstrip()
        return next((tag for tag in (THINK, THINK_END) if end.endswith(tag)), None)
