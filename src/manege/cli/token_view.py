"""Tokens as text that shows what is usually invisible: white space, control characters, and where a token ends.

A piece is the text that a token adds to those before it; a token that ends within a character, or has no text, shows
its id instead: ⟨226⟩. Without a tokenizer every piece is an id.
"""

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from manege.cli.tree_view import STYLES, CallRow
from manege.rendering.text import Detokeniser
from manege.trainer.algo.ledger import Reason
from manege.types import Call, IntArray, JsonObject

__all__ = ["call_tokens", "pieces", "token_lists", "visible"]

_BOUNDARY = "┊"
_BEFORE = 8
"""Tokens read before the first piece: the text of a token may depend on those just before it."""
_MARKS = {" ": "·", "\n": "↵\n", "\t": "⇥"}


def visible(text: str) -> str:
    """White space as `·`, `⇥` and `↵` (followed by a new line); what a terminal would obey, escaped."""
    return "".join(_MARKS.get(char) or (char if char.isprintable() else ascii(char)[1:-1]) for char in text)


def pieces(tokenizer: Tokenizer | None, ids_T: IntArray, start: int, stop: int | None = None) -> Sequence[str]:
    """Of the tokens [start, stop)."""
    window = ids_T[start:stop].tolist()
    if tokenizer is None:
        return [str(token) for token in window]
    text = Detokeniser(tokenizer, ())
    text.push_all(ids_T[max(0, start - _BEFORE) : start].tolist())
    return [text.push(token) or f"⟨{token}⟩" for token in window]


def call_tokens(row: CallRow, call: Call, tokenizer: Tokenizer | None) -> RenderableType:
    """What is new in the prompt, and the answer with the boundaries of its tokens; by class of tokens."""
    ids_T, num_prompt = np.concatenate([call.prompt_ids_P, call.response_ids_R]), row.num_prompt
    prompt = pieces(tokenizer, ids_T, num_prompt - row.num_new, num_prompt)
    answer = pieces(tokenizer, ids_T, num_prompt)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    if known := num_prompt - row.num_new:
        grid.add_row(Text("as before", style="dim"), Text(f"{known} tokens", style="dim italic"))
    if prompt:
        shown = visible("".join(prompt)) if tokenizer else " ".join(prompt)
        grid.add_row(Text("context", style="dim"), Text(shown, style="dim"))
    rest = Reason.OVER_LIMIT if row.reason is Reason.TRAINED else row.reason
    for reason, part in ((Reason.TRAINED, answer[: row.num_trained]), (rest, answer[row.num_trained :])):
        if part:
            style = STYLES[reason.fate]
            shown = Text(_BOUNDARY, style="dim").join(Text(visible(piece), style=style) for piece in part)
            grid.add_row(Text(reason, style=style), Text.assemble(shown, (_BOUNDARY, "dim")))
    head = Text.assemble(
        (f"{row.id[:8]}", "bold"), f"  turn {row.turn}, {row.finish_reason}, {row.num_sampled} sampled"
    )
    return Group(head, grid, "")


def token_lists(call: Call, tokenizer: Tokenizer | None) -> JsonObject:
    """Every token as [id, piece], for `--json`."""
    ids_T = np.concatenate([call.prompt_ids_P, call.response_ids_R])
    both = list(zip(ids_T.tolist(), pieces(tokenizer, ids_T, 0), strict=True))
    return {"prompt": both[: len(call.prompt_ids_P)], "sampled": both[len(call.prompt_ids_P) :]}
