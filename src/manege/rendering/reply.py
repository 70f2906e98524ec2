"""The parser of the generic renderer: sampled ids to content, reasoning and tool calls, token by token.

`<think>...</think>` in front is reasoning, also where the prompt opened it; what is cut stays reasoning. New lines
around reasoning belong to its tags, white space around tool calls to theirs. All text, reasoning and calls included,
ends before the first stop string, as engines stop there.
"""

from collections.abc import Sequence

from manege.rendering.base import ParsedReply, ToolCall
from manege.rendering.calls import CallScanner
from manege.rendering.text import Detokeniser, StopCut, cut

__all__ = ["THINK", "THINK_END", "LiveReply"]

THINK, THINK_END = "<think>", "</think>"


class LiveReply:
    """See `rendering.base.LiveParser`."""

    def __init__(
        self, detokeniser: Detokeniser, calls: CallScanner | None, *, is_thinking: bool, stop: Sequence[str]
    ) -> None:
        """`calls`: None when there are no tools, so that all text is content. `is_thinking`: the prompt ended inside
        of a reasoning block."""
        self._detokeniser = detokeniser
        self._stop = StopCut(stop)
        self._calls = calls
        self._part = "reasoning" if is_thinking else "start"
        """`start`, `reasoning`, `gap` (behind it) or `content`."""
        self._held = ""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCall] = []
        self._newlines = self._space = ""
        """Kept back at the end of the reasoning and of the content."""
        self._has_reasoned = self._has_spoken = self._has_called = False

    def feed(self, ids: Sequence[int]) -> ParsedReply:
        self._add(self._stop.push(self._detokeniser.push_all(ids)))
        return self._take()

    def finish(self) -> ParsedReply:
        self._add(self._stop.push(self._detokeniser.end()) + self._stop.end())
        if self._part == "reasoning":
            self._reason(self._held)
        else:
            self._say(self._held)
        if self._calls is not None:
            self._speak(self._calls.end())
        if not self._has_called:
            self._content.append(self._space)
        self._held = self._space = ""
        return self._take()

    @property
    def stopped_by(self) -> str | None:
        return self._stop.found

    def _add(self, text: str) -> None:
        if not text:
            return
        self._held += text
        if self._part == "start":
            begun = self._held.lstrip()
            if begun.startswith(THINK):
                self._part, self._held = "reasoning", begun.removeprefix(THINK)
            elif THINK.startswith(begun):
                return
            else:
                self._part = "content"
        if self._part == "reasoning":
            inside, end, self._held = cut(self._held, (THINK_END,))
            self._reason(inside)
            if end is None:
                return
            self._part = "gap"
        if self._part == "gap":
            self._held = self._held.lstrip("\n")
            if not self._held:
                return
            self._part = "content"
        text, self._held = self._held, ""
        self._say(text)

    def _reason(self, text: str) -> None:
        text = self._newlines + text if self._has_reasoned else text.lstrip("\n")
        shown = text.rstrip("\n")
        self._newlines = text[len(shown) :]
        if shown:
            self._reasoning.append(shown)
            self._has_reasoned = True

    def _say(self, text: str) -> None:
        if self._calls is None:
            self._content.append(text)
            return
        for piece in self._calls.push(text):
            if isinstance(piece, ToolCall):
                self._tool_calls.append(piece)
                self._has_called = True
            else:
                self._speak(piece)

    def _speak(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            is_behind_call = self._has_called and not self._has_spoken
            self._content.append(shown.lstrip() if is_behind_call else shown)
            self._has_spoken = True

    def _take(self) -> ParsedReply:
        reply = ParsedReply(
            content="".join(self._content),
            reasoning="".join(self._reasoning) or None,
            tool_calls=self._tool_calls,
        )
        self._content, self._reasoning, self._tool_calls = [], [], []
        return reply
