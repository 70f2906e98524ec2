"""Streams what the library `renderers` will say of an answer, of which it has a parser for whole answers only.

The library's parser is asked where text stands: the ids so far and a mark behind them are parsed, and the mark is in
the reasoning, in the content, or elsewhere (in a tool call, a header). Until the next token that may change this (any
added token, or text that is a tag), further text is in the same place and is given out at once. Elsewhere nothing is
given out; tool calls come at the end. The parser reads all ids again for each question, so there is a limit on them,
behind which the rest comes at the end too.
"""

from collections import deque
from collections.abc import Callable, Container, Sequence

from tokenizers import Tokenizer

from manege.rendering.base import ParsedReply
from manege.rendering.text import Detokeniser, StopCut, cut, num_open

__all__ = ["KnownLive", "ParseIds"]

ParseIds = Callable[[Sequence[int], bool], ParsedReply]
"""The ids, and whether they are the whole answer: then attempts at calls are part of the content."""

_MARK = "maNegeMark"


class KnownLive:
    """See `rendering.base.LiveParser`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        parse: ParseIds,
        *,
        added: Container[int],
        special: Container[int],
        tags: Sequence[str],
        is_json_call: bool,
        max_questions: int,
        stop: Sequence[str],
    ) -> None:
        """`parse`: no part of what it returns begins or ends with space. `tags`: those that may be plain text.
        `is_json_call`: text that is a JSON object may be a call, without any tag. `max_questions`: to `parse`."""
        self._parse = parse
        self._added = added
        self._tags = tags
        self._is_json_call = is_json_call
        self._stop = _StopIds(tokenizer, special, stop)
        self._detokeniser = Detokeniser(tokenizer, ())
        self._mark = tokenizer.encode(_MARK, add_special_tokens=False).ids
        self._ids: list[int] = []
        self._content, self._reasoning = _Part(), _Part()
        self._place: _Part | None = None
        """Where text stands; None: not known."""
        self._held = ""
        self._num_questions = 0
        self._max_questions = max_questions

    def feed(self, ids: Sequence[int]) -> ParsedReply:
        for token in ids:
            for certain in self._stop.push(token):
                self._add(certain)
        return ParsedReply(content=self._content.take(), reasoning=self._reasoning.take() or None, tool_calls=())

    def finish(self) -> ParsedReply:
        for token in self._stop.end():
            self._add(token)
        reply = self._parse(self._ids, True)
        self._content.settle(reply.content)
        self._reasoning.settle(reply.reasoning or "")
        content, reasoning = self._content.take(), self._reasoning.take() or None
        return ParsedReply(content=content, reasoning=reasoning, tool_calls=reply.tool_calls)

    @property
    def stopped_by(self) -> str | None:
        return self._stop.found

    def _add(self, token: int) -> None:
        self._ids.append(token)
        text = self._detokeniser.push(token)
        if token in self._added:
            self._place = None
        elif self._place is not None:
            text, tag, self._held = cut(self._held + text, self._tags)
            self._place.add(text)
            if tag:
                self._place = None
        elif text.strip() and self._detokeniser.is_whole and self._num_questions < self._max_questions:
            self._ask()

    def _ask(self) -> None:
        self._num_questions += 1
        reply = self._parse([*self._ids, *self._mark], False)
        for part, said in ((self._reasoning, reply.reasoning or ""), (self._content, reply.content)):
            text, given = said.removesuffix(_MARK), part.text
            if text == said or not text.startswith(given):
                continue
            if self._is_json_call and part is self._content and text.startswith("{"):
                continue
            certain = max(len(given), len(text) - num_open(text, self._tags))
            part.space = ""
            part.add(text[len(given) : certain])
            self._place, self._held = part, text[certain:]


class _Part:
    """The text of one part of the answer; space at its end is kept back."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._num_taken = 0
        self.space = ""

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        text = self.space + text if self._pieces else text.lstrip()
        shown = text.rstrip()
        self.space = text[len(shown) :]
        if shown:
            self._pieces.append(shown)

    def settle(self, text: str) -> None:
        """The whole text. Where odd ids made the parser take back what it had said, all of it is given again."""
        given = self.text
        self._pieces.append(text[len(given) :] if text.startswith(given) else text)

    def take(self) -> str:
        new = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return new


class _StopIds:
    """Ids in, the same ids out up to the first stop string in their visible text."""

    def __init__(self, tokenizer: Tokenizer, hidden: Container[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._detokeniser = Detokeniser(tokenizer, hidden)
        self._cut = StopCut(stop)
        self._is_off = not any(stop)
        self._queue: deque[tuple[int, str, bool]] = deque()
        """Tokens that were not given out, their text, and whether it is all of it."""
        self._num_certain = 0
        """Characters at the front of the queue that do not belong to a stop string."""

    @property
    def found(self) -> str | None:
        return self._cut.found

    def push(self, token: int) -> Sequence[int]:
        if self._is_off:
            return (token,)
        if self.found is not None:
            return ()
        text = self._detokeniser.push(token)
        self._queue.append((token, text, self._detokeniser.is_whole))
        self._num_certain += len(self._cut.push(text))
        return self._release()

    def end(self) -> Sequence[int]:
        text = self._detokeniser.end()
        if self._queue:
            token, before, _ = self._queue.pop()
            self._queue.append((token, before + text, True))
        self._num_certain += len(self._cut.push(text)) + len(self._cut.end())
        return self._release()

    def _release(self) -> list[int]:
        ids = []
        while self._queue:
            token, text, is_whole = self._queue[0]
            if len(text) + (not is_whole) > self._num_certain:
                break
            ids.append(token)
            self._num_certain -= len(text)
            self._queue.popleft()
        if self.found is not None:
            # The stop string may begin within a token, whose first characters are still part of the answer.
            text = "".join(text for _, text, _ in self._queue)[: self._num_certain]
            ids += self._tokenizer.encode(text, add_special_tokens=False).ids
            self._queue.clear()
        return ids
