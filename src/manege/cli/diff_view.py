"""Where the prompts of two calls part: as messages, as text and as tokens, and what that looks like.

Of the earlier call the answer counts, too: that is where its continuation may fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from manege.cli.token_view import pieces, visible
from manege.cli.tree_view import said
from manege.trainer.algo.history import messages_before
from manege.trainer.algo.token_tree import shared_length
from manege.types import Call, CallId, IntArray, JsonObject

__all__ = ["Parting", "diff_view", "parting"]

_BEFORE, _AFTER = 3, 6
"""Tokens shown around the first difference."""
_WINDOW = 32
"""Characters shown on either side of it; also tokens that are compared as text."""
Token = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Of two calls, the earlier one first; also the form of `--json`."""

    calls: tuple[CallId, CallId]
    num_tokens: tuple[int, int]
    """Of the first prompt with its answer, and of the second prompt."""
    at: int
    """Leading tokens that both have."""
    looks_like: str
    message: int | None
    """Position of the first message that differs; None: none does, or they are not known."""
    messages: tuple[str, str] | None
    """These messages around their first difference."""
    texts: tuple[str, str] | None
    """The decoded tokens around their first difference; None: there is none, or no tokenizer."""
    first: int
    """Position of the first of the shown tokens."""
    tokens: tuple[Sequence[Token], Sequence[Token]]
    """(id, piece) of each call's from there on; fewer where it ends."""


def parting(calls: Sequence[Call], names: tuple[CallId, CallId], tokenizer: Tokenizer | None) -> Parting:
    """Compare two of the `calls` of one attempt."""
    a, b = (call for call in calls if call.id in names)
    left, right = np.concatenate([a.prompt_ids_P, a.response_ids_R]), b.prompt_ids_P
    at = shared_length(left, right)
    first, stop = max(0, at - _BEFORE), at + _AFTER

    def window(ids_T: IntArray) -> Sequence[Token]:
        return list(zip(ids_T[first:stop].tolist(), pieces(tokenizer, ids_T, first, stop), strict=True))

    by_id = {call.id: call for call in calls}
    conversations = [_spoken([*messages_before(a, by_id), a.reply]), _spoken(messages_before(b, by_id))]
    message = _first_difference(*conversations)
    texts = None if tokenizer is None else [tokenizer.decode(ids.tolist(), False) for ids in (left, right)]
    return Parting(
        calls=(a.id, b.id),
        num_tokens=(len(left), len(right)),
        at=at,
        looks_like=_looks_like(left, right, at, tokenizer, message, is_known=bool(conversations[1])),
        message=message,
        messages=None if message is None else _around(*(conversation[message] for conversation in conversations)),
        texts=None if texts is None or _first_difference(*texts) is None else _around(*texts),
        first=first,
        tokens=(window(left), window(right)),
    )


def _looks_like(
    left: IntArray, right: IntArray, at: int, tokenizer: Tokenizer | None, message: int | None, *, is_known: bool
) -> str:
    if at == len(left):
        return "nothing parts: the second call continues the first"
    if at == len(right):
        return "nothing parts: the second prompt is the beginning of the first, or equal to it"
    if tokenizer is not None and _same_text(left[at:], right[at:], tokenizer):
        return "retokenisation: the same text, but other token ids"
    if not is_known:
        return "another text; the messages are not known"
    if message is not None:
        return "history rewritten, or another conversation: the messages differ"
    reasons = "the chat template writes them otherwise" + (", or retokenisation" if tokenizer is None else "")
    return f"template: the same messages; {reasons}"


def _same_text(left: IntArray, right: IntArray, tokenizer: Tokenizer) -> bool:
    """Whether the text goes on alike for longer than either of the two tokens that differ."""
    a, b = (tokenizer.decode(ids[:_WINDOW].tolist(), False) for ids in (left, right))
    longest = max(len(tokenizer.decode(ids[:1].tolist(), False)) for ids in (left, right))
    same = _first_difference(a, b)
    return same is None or same >= longest


def _spoken(messages: Sequence[JsonObject]) -> Sequence[str]:
    return [f"{message.get('role', 'assistant')}: {said(message)}" for message in messages]


def _first_difference(a: Sequence[str], b: Sequence[str]) -> int | None:
    """None: one begins with the other."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def _around(a: str, b: str) -> tuple[str, str]:
    at = _first_difference(a, b)
    at = min(len(a), len(b)) if at is None else at
    start = max(0, at - _WINDOW)
    cut = "…" if start else ""
    return cut + a[start : at + _WINDOW], cut + b[start : at + _WINDOW]


def diff_view(found: Parting) -> RenderableType:
    """For people."""
    names = [name[:8] for name in found.calls]
    parts: list[RenderableType] = [
        Text(found.looks_like, style="bold"),
        f"{found.at} tokens are the same; "
        f"{names[0]} has {found.num_tokens[0]} with its answer, {names[1]} asks with {found.num_tokens[1]}",
    ]
    for title, texts in (
        (f"message {found.message} differs", found.messages),
        ("text", found.texts),
    ):
        if texts is not None:
            grid = Table.grid(padding=(0, 2))
            for name, text, style in zip(names, texts, ("red", "green"), strict=True):
                grid.add_row(name, Text(visible(text).replace("\n", ""), style=style))
            parts += ["", Text(title, style="bold"), grid]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("token", justify="right")
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("")
    for position, sides in enumerate(zip_longest(*found.tokens, fillvalue=("", "(end)")), found.first):
        row = [Text(str(position))]
        for (token, piece), style in zip(sides, ("red", "green"), strict=True):
            style = "" if position < found.at else style
            row += [Text(str(token), style=style), Text(visible(piece).replace("\n", ""), style=style)]
        table.add_row(*row)
    return Group(*parts, "", table)
