"""Sampled ids to text while they are sampled, and the places where a text is cut.

The text of one token depends on those before it: a character may be spread over several tokens, and some tokenizers
drop a space at the very start. So a few tokens are decoded again with each new one, and only what is added is given
out; a character that is not whole yet is kept back. The work per token does not grow with the answer.
"""

from collections.abc import Container, Sequence

from tokenizers import Tokenizer

from manege.rendering.base import LiveParser, ParsedReply

__all__ = ["Detokeniser", "LiveText", "StopCut", "cut", "num_open", "whole_reply"]

_BROKEN = "\ufffd"
"""What decoders write for bytes that are no character (yet)."""
_MAX_WINDOW = 32
"""Tokens that are decoded again at most: a character has four bytes, so far more than one can be spread over."""


def cut(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """The text before the mark that is complete first, this mark, and what follows it. Where there is none: the text
    that cannot belong to a mark any more, None, and the end that still may.

    >>> cut("so</th", ["</think>"])
    ('so', None, '</th')
    """
    found = [(position + len(mark), -len(mark), mark) for mark in marks if (position := text.find(mark)) >= 0]
    if found:
        end, _, mark = min(found)
        return text[: end - len(mark)], mark, text[end:]
    size = num_open(text, marks)
    return text[: len(text) - size], None, text[len(text) - size :]


def num_open(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)


class Detokeniser:
    """Ids in, text out, one by one."""

    def __init__(self, tokenizer: Tokenizer, hidden: Container[int]) -> None:
        """`hidden`: ids that have no text."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        self._text = ""
        self._shown = 0
        """Characters of `_text`, which is the text of the window, that were given out."""

    @property
    def is_whole(self) -> bool:
        """Whether no part of a character is kept back."""
        return self._shown == len(self._text)

    def push(self, token: int) -> str:
        """The text that the token adds."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        self._text = text = self._decode(self._window)
        is_full = len(self._window) > _MAX_WINDOW
        # Further bytes may turn the last broken characters into whole ones, but not beyond any length.
        certain = len(text) - 1 if is_full and text.endswith(_BROKEN) else len(text.rstrip(_BROKEN))
        new = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if certain == len(text):
            alone = self._decode([token])
            if _BROKEN not in alone:
                self._window, self._text = [token], alone
            elif is_full:
                self._window, self._text = [], ""
            self._shown = len(self._text)
        elif is_full:
            self._window = self._window[-4:]
            self._text = self._decode(self._window)
            self._shown = len(self._text) - 1
        return new

    def push_all(self, ids: Sequence[int]) -> str:
        """The same for several tokens, at once where all their characters are whole."""
        visible = [token for token in ids if token not in self._hidden]
        if len(visible) > 1:
            text, alone = self._decode([*self._window, *visible]), self._decode(visible[-1:])
            if _BROKEN not in text and _BROKEN not in alone:
                new = text[self._shown :]
                self._window, self._text, self._shown = visible[-1:], alone, len(alone)
                return new
        return "".join(map(self.push, visible))

    def end(self) -> str:
        """What was kept back."""
        new, self._shown = self._text[self._shown :], len(self._text)
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopCut:
    """Text in, the same text out up to the first stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [text for text in stop if text]
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """What is certain not to belong to a stop string."""
        if self.found is not None:
            return ""
        before, self.found, self._held = cut(self._held + text, self._stop)
        return before

    def end(self) -> str:
        """What was kept back and did not become a stop string."""
        held, self._held = self._held, ""
        return "" if self.found is not None else held


class LiveText:
    """See `rendering.base.LiveParser`: all text is content."""

    def __init__(self, detokeniser: Detokeniser, stop: Sequence[str]) -> None:
        self._detokeniser = detokeniser
        self._stop = StopCut(stop)

    def feed(self, ids: Sequence[int]) -> ParsedReply:
        return _content(self._stop.push(self._detokeniser.push_all(ids)))

    def finish(self) -> ParsedReply:
        return _content(self._stop.push(self._detokeniser.end()) + self._stop.end())

    @property
    def stopped_by(self) -> str | None:
        return self._stop.found


def whole_reply(parser: LiveParser, ids: Sequence[int]) -> ParsedReply:
    """What the parser says of a whole answer."""
    first, last = parser.feed(ids), parser.finish()
    return ParsedReply(
        content=first.content + last.content,
        reasoning=((first.reasoning or "") + (last.reasoning or "")) or None,
        tool_calls=[*first.tool_calls, *last.tool_calls],
    )


def _content(text: str) -> ParsedReply:
    return ParsedReply(content=text, reasoning=None, tool_calls=())
