"""The calls of one attempt as a forest: each call's parent is the call that it continues.

In: calls in the order in which they were answered. Out: the same calls, each with the index of its parent or None.
The parent is the earlier call whose `prompt + response` is the longest prefix of the prompt, and longer than its own
prompt where it is all of it (an answer that the agent has continued, nothing added). Among equals: the one that the
gateway recorded, then a delivered one, then the latest. What the gateway recorded is only a hint: tokens decide. Linear
in the tokens (token_tree.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from manege.trainer.algo.token_tree import TokenTree
from manege.types import Call, Delivered

__all__ = ["Forest", "build_forest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Parallel sequences over the calls of one attempt."""

    calls: Sequence[Call]
    parents: Sequence[int | None]
    """Index into `calls`, always smaller than the child's own."""
    num_shared: Sequence[int]
    """Leading tokens of the call's prompt + response that some earlier call has, too."""
    nearest: Sequence[int | None]
    """The call that brought the last of these; None: nothing is shared."""
    num_unique: int
    """Tokens of all calls; those shared as a prefix count once."""

    def __post_init__(self) -> None:
        for child, parent in zip(range(len(self.calls)), self.parents, strict=True):
            assert parent is None or parent < child

    def leaves(self) -> Sequence[int]:
        """Calls that nothing continued, in order."""
        inner = set(self.parents)
        return [index for index in range(len(self.calls)) if index not in inner]

    def path(self, index: int) -> Sequence[int]:
        """From the root to this call."""
        path = [index]
        while (parent := self.parents[path[-1]]) is not None:
            path.append(parent)
        return path[::-1]


def build_forest(calls: Sequence[Call]) -> Forest:
    """Find every call's parent."""
    tree = TokenTree()
    parents: list[int | None] = []
    num_shared, nearest = [], []
    for index, call in enumerate(calls):
        placed = tree.add(index, call.prompt_ids_P, call.response_ids_R)
        parents.append(_parent(calls, call, placed.prefixes))
        num_shared.append(placed.num_shared)
        nearest.append(placed.nearest)
    return Forest(calls=calls, parents=parents, num_shared=num_shared, nearest=nearest, num_unique=tree.num_tokens)


def _parent(calls: Sequence[Call], child: Call, prefixes: Sequence[tuple[int, Sequence[int]]]) -> int | None:
    for length, items in prefixes:
        is_whole = length == len(child.prompt_ids_P)
        candidates = [c for c in items if not is_whole or len(calls[c].response_ids_R)]
        if candidates:
            return max(candidates, key=lambda c: (calls[c].id == child.parent, calls[c].delivered is Delivered.YES, c))
    return None
