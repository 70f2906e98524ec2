"""The calls of one rollout as a tree: what each added, what was sampled, what became of it, and where lines part.

A call that continues the one above it stands under it (`│`); a second continuation is set in (`├─●`); a call that
continues none begins at the margin (`●`).
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from manege.trainer.algo.branches import BranchKind, branches
from manege.trainer.algo.forest import Forest
from manege.trainer.algo.ledger import Fate, Reason
from manege.trainer.algo.samples import Sample
from manege.types import Call, CallId, Delivered, FinishReason, JsonObject

__all__ = ["STYLES", "CallRow", "call_rows", "excerpt", "said", "tree_table"]

STYLES: Mapping[Fate, str] = {
    Fate.TRAINED: "green",
    Fate.DEAD: "red",
    Fate.TRUNCATED: "yellow",
    Fate.EXCLUDED: "magenta",
}
_ID_SIZE = 8
_EXCERPT = 200
"""Characters: more than any line has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow:
    """One call, as it is shown; also the form of `--json`."""

    guide: str
    """The lines of the tree left of it."""
    id: CallId
    parent: CallId | None
    """By tokens, as the trainer sees it."""
    thread: str
    protocol: str
    turn: int
    """Calls from the root of its tree to this one."""
    num_prompt: int
    num_new: int
    """Prompt tokens that no earlier call has."""
    num_sampled: int
    num_trained: int
    """The first tokens of the answer; fewer than sampled where the sample's limit cuts it."""
    finish_reason: FinishReason
    delivered: Delivered
    reason: Reason
    """Why its tokens are trained or not."""
    branch: BranchKind | None
    """None: it is the first of all, or the first to continue its parent."""
    said: str


def call_rows(forest: Forest, samples: Sequence[Sample], reasons: Sequence[Reason]) -> Sequence[CallRow]:
    """In the order of the tree. `samples`: those that are trained; `reasons`: why a call's tokens are not, else."""
    kinds = {branch.call: branch.kind for branch in branches(forest)}
    trained = {span.call_id: span.stop - span.start for sample in samples for span in sample.spans}
    return [
        CallRow(
            guide=guide,
            id=call.id,
            parent=None if (parent := forest.parents[index]) is None else forest.calls[parent].id,
            thread=call.thread,
            protocol=call.protocol,
            turn=len(forest.path(index)),
            num_prompt=len(call.prompt_ids_P),
            num_new=max(0, len(call.prompt_ids_P) - forest.num_shared[index]),
            num_sampled=len(call.response_ids_R),
            num_trained=trained.get(call.id, 0),
            finish_reason=call.finish_reason,
            delivered=call.delivered,
            reason=reasons[index],
            branch=kinds.get(index),
            said=excerpt(call),
        )
        for index, guide in _in_tree_order(forest)
        for call in [forest.calls[index]]
    ]


def _in_tree_order(forest: Forest) -> Iterator[tuple[int, str]]:
    """Each call with its guide. Without recursion: conversations may be longer than Python's stack."""
    children: dict[int | None, list[int]] = defaultdict(list)
    for index, parent in enumerate(forest.parents):
        children[parent].append(index)
    # (call, guide of the lines around it, its own mark)
    stack = [(root, "", "●") for root in reversed(children[None])]
    while stack:
        index, lead, mark = stack.pop()
        yield index, lead + mark
        inner = lead + ("│ " if mark == "├─●" else "")
        first, others = children[index][:1], children[index][1:]
        stack += [(child, inner, "│") for child in first]
        stack += [(child, inner, "├─●") for child in reversed(others)]


def tree_table(rows: Sequence[CallRow]) -> Table:
    """Columns that say the same in every row are left to the header."""
    show_thread = {row.thread for row in rows} != {"main"}
    show_end = any(_end(row).plain != FinishReason.STOP for row in rows)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", expand=True)
    table.add_column("call", no_wrap=True)
    if show_thread:
        table.add_column("thread", no_wrap=True, max_width=16)
    for name in ("turn", "prompt", "new", "sampled"):
        table.add_column(name, justify="right", no_wrap=True)
    if show_end:
        table.add_column("end", no_wrap=True)
    table.add_column("tokens are", no_wrap=True)
    table.add_column("said", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        numbers = [str(row.turn), str(row.num_prompt), f"+{row.num_new}", str(row.num_sampled)]
        thread, end = [Text(row.thread)] if show_thread else [], [_end(row)] if show_end else []
        name = Text.assemble((row.guide, "dim"), " ", row.id[:_ID_SIZE])
        table.add_row(name, *thread, *numbers, *end, _fate(row), _said(row))
    return table


def _end(row: CallRow) -> Text:
    end = Text(row.finish_reason, style="" if row.finish_reason is FinishReason.STOP else "yellow")
    if row.delivered is not Delivered.YES:
        end.append(", lost" if row.delivered is Delivered.NO else ", lost?", style="red")
    return end


def _fate(row: CallRow) -> Text:
    partly = f" {row.num_trained} of {row.num_sampled}" if 0 < row.num_trained < row.num_sampled else ""
    return Text(row.reason + partly, style=STYLES[row.reason.fate])


def _said(row: CallRow) -> Text:
    return Text.assemble((f"[{row.branch}] " if row.branch else "", "cyan"), row.said)


def excerpt(call: Call) -> str:
    """What was answered, on one line."""
    # A model may sample what a terminal would obey.
    return "".join(char if char.isprintable() else " " for char in " ".join(said(call.reply)[:_EXCERPT].split()))


def said(message: JsonObject) -> str:
    """A message's text and its tools with their arguments, or its thoughts where there is nothing else."""
    content = message.get("content") or message.get("text") or ""
    parts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)]
    for tool in message.get("tool_calls") or []:
        parts.append(f"{tool['function']['name']}({tool['function']['arguments']})")
    if not any(parts) and message.get("reasoning_content"):
        parts = ["(thinks)", str(message["reasoning_content"])]
    return " ".join(filter(None, parts))
