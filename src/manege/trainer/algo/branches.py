"""Why a rollout is more than one line of calls: every call that does not simply continue another, with the kind of it.

Tokens say where a call leaves what was there before; its messages say why. Some branches are the agent's nature (forks,
sub-agents, compaction), others cost samples and can be helped (rewritten history, templates, retokenisation). Only
branches are looked at, so the messages of linear rollouts are never read. Kinds are for diagnosis: nothing is trained
otherwise because of them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from manege.trainer.algo.forest import Forest
from manege.trainer.algo.history import messages_before
from manege.types import JsonObject

__all__ = ["Branch", "BranchKind", "Decode", "branches"]

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""
_Before = Callable[[int], Sequence[JsonObject]]
"""The messages that a call was asked with."""

_MIN_QUOTE = 20
"""Characters of an answer that a summary must repeat: shorter texts (`yes`, a path) return by chance."""

_EXPANSION = 4
"""Tokens that the text of one sampled token may become; the longest ones are words."""


class BranchKind(StrEnum):
    """What made the branch."""

    FORK = "fork"
    """Continues an answer that another call continues, too: parallel calls, a step taken back."""
    REPEATED = "repeated"
    """The same prompt again: several choices, best-of-n, a request sent again."""
    SUB_AGENT = "sub_agent"
    """A conversation of its own."""
    SIDE_CALL = "side_call"
    """A title, a summary ... as the harness is known to ask for."""
    COMPACTION = "compaction"
    """History was replaced by something shorter."""
    REWRITTEN = "history_rewritten"
    """The harness changed or stripped earlier messages."""
    TEMPLATE = "template"
    """The same messages, which the chat template now writes otherwise."""
    RETOKENISATION = "retokenisation"
    """The same messages and text, but other token ids than were sampled."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One call that begins a line of its own."""

    call: int
    """Index into the forest's calls."""
    kind: BranchKind


def branches(forest: Forest, decode: Decode | None = None) -> Sequence[Branch]:
    """All branches of one attempt, in the order of the calls. Without `decode`, whether an answer that came back in
    other tokens has another text is guessed from whether it has reasoning, which templates drop."""
    by_id = {call.id: call for call in forest.calls}

    def before(index: int) -> Sequence[JsonObject]:
        return messages_before(forest.calls[index], by_id)

    continued: set[int] = set()
    found: list[Branch] = []
    for index, parent in enumerate(forest.parents):
        if index and (parent is None or parent in continued):
            found.append(Branch(call=index, kind=_kind(forest, before, index, decode)))
        if parent is not None:
            continued.add(parent)
    return found


def _kind(forest: Forest, before: _Before, index: int, decode: Decode | None) -> BranchKind:
    call, parent = forest.calls[index], forest.parents[index]
    if call.thread != "main" and all(earlier.thread != call.thread for earlier in forest.calls[:index]):
        return BranchKind.SIDE_CALL if call.thread.startswith("side:") else BranchKind.SUB_AGENT
    if _is_repeated(forest, index):
        return BranchKind.REPEATED
    messages = before(index)
    if not messages:
        return BranchKind.UNKNOWN if parent is None else BranchKind.FORK
    if parent is not None and not _answers(messages[len(before(parent)) + 1 :]):
        return BranchKind.FORK
    nearest = forest.nearest[index]
    if nearest is None:
        nearest = index - 1
    known = [*before(nearest), forest.calls[nearest].reply]
    same = _num_equal(messages, known)
    if same == len(known):
        return _drift(forest, before, index, nearest, decode)
    if same == len(known) - 1 and messages[same : same + 1] and messages[same]["role"] == "assistant":
        return BranchKind.REWRITTEN
    replies = [earlier.reply for earlier in forest.calls[:index]]
    if not _answers(messages):
        return BranchKind.COMPACTION if _quotes(messages, replies) else BranchKind.SUB_AGENT
    if len(messages) < len(known) and (same or _quotes(messages, replies)):
        return BranchKind.COMPACTION
    keys = [_key(reply) for reply in replies]
    return BranchKind.REWRITTEN if any(_key(m) in keys for m in _answers(messages)) else BranchKind.UNKNOWN


def _drift(forest: Forest, before: _Before, index: int, nearest: int, decode: Decode | None) -> BranchKind:
    """The messages continue those of `nearest`, the tokens do not: by where they part, and what was said there."""
    at, prompt_P = forest.num_shared[index], forest.calls[index].prompt_ids_P
    for earlier in forest.path(nearest):
        call = forest.calls[earlier]
        start = len(call.prompt_ids_P)
        if not start <= at < start + len(call.response_ids_R):
            continue
        sent_back = before(index)[len(before(earlier))]
        if call.reply.get("reasoning_content") and not sent_back.get("reasoning_content"):
            return BranchKind.REWRITTEN
        sampled = call.response_ids_R[at - start :].tolist()
        if decode is None:
            is_same_text = not call.reply.get("reasoning_content")
        else:
            is_same_text = decode(prompt_P[at : at + _EXPANSION * len(sampled)].tolist()).startswith(decode(sampled))
        return BranchKind.RETOKENISATION if is_same_text else BranchKind.TEMPLATE
    return BranchKind.TEMPLATE


def _is_repeated(forest: Forest, index: int) -> bool:
    prompt_P = forest.calls[index].prompt_ids_P
    return forest.num_shared[index] >= len(prompt_P) and any(
        np.array_equal(earlier.prompt_ids_P, prompt_P) for earlier in forest.calls[:index]
    )


def _answers(messages: Sequence[JsonObject]) -> Sequence[JsonObject]:
    return [message for message in messages if message["role"] == "assistant"]


def _quotes(messages: Sequence[JsonObject], replies: Sequence[JsonObject]) -> bool:
    """Whether what was not said by the model repeats what was: a summary."""
    texts = [text for reply in replies if len(text := _text(reply)) >= _MIN_QUOTE]
    return any(text in _text(message) for message in messages if message["role"] != "assistant" for text in texts)


def _num_equal(a: Sequence[JsonObject], b: Sequence[JsonObject]) -> int:
    for number, (x, y) in enumerate(zip(a, b, strict=False)):
        if _key(x) != _key(y):
            return number
    return min(len(a), len(b))


def _key(message: JsonObject) -> tuple[Any, ...]:
    """What makes messages the same: reasoning and ids apart, and arguments as JSON."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (
        message.get("role", "assistant"),
        _text(message),
        [(call["name"], _json(call.get("arguments"))) for call in calls],
    )


def _text(message: JsonObject) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content.strip()
    return "".join(part.get("text") or "" for part in content or ()).strip()


def _json(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
