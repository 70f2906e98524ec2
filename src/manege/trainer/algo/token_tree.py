"""A tree of token sequences in which every shared prefix is kept once (a radix tree).

In: sequences with an item each, one after the other. Out: what a new sequence shares with earlier ones, which earlier
sequences are its prefixes, and all of them in lexicographic order. Adding compares and copies every token at most
once, so time is linear in the tokens, and what is kept is linear in the distinct ones.

Worked example: a b c, a b d, a b -> node "a b" (where the third ends) with the children "c" and "d".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manege.types import IntArray

__all__ = ["Placed", "TokenTree", "shared_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a sequence met those that were added before it."""

    num_shared: int
    """Its leading tokens that were there already."""
    nearest: int | None
    """The item that brought the last of them; None: it shares nothing."""
    prefixes: Sequence[tuple[int, Sequence[int]]]
    """(length, items) of earlier sequences that its first part starts with or equals: the two longest lengths, longest
    first; the empty sequence left out."""


class _Node:
    """Tokens from the parent's `end` to `end`, and who ends there."""

    __slots__ = ("children", "end", "ids_T", "items", "owner")

    def __init__(self, ids_T: IntArray, end: int, owner: int | None) -> None:
        self.ids_T, self.end, self.owner = ids_T, end, owner
        self.items: list[int] = []
        self.children: dict[int, _Node] = {}


class TokenTree:
    """Not safe for concurrent use."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int32), 0, None)
        # Most sequences continue the one before them: one comparison with it instead of one per node of its path.
        self._path = [self._root]
        self._last_T = self._room_T = np.empty(0, np.int32)
        self.num_tokens = 0
        """Distinct (prefix, token) pairs added so far."""

    def add(self, item: int, *parts: IntArray) -> Placed:
        """Add the sequence of these parts; the tree keeps a copy of what is new in it."""
        as_last = self._take(parts)
        ids_T, path = self._last_T, self._path
        while path[-1].end > as_last:
            path.pop()
        node = path[-1]
        while node.end < len(ids_T) and (child := node.children.get(int(ids_T[node.end]))):
            num_equal = shared_length(child.ids_T, ids_T[node.end :])
            node = child if num_equal == len(child.ids_T) else _split(node, child, num_equal)
            path.append(node)
        placed = Placed(num_shared=node.end, nearest=node.owner, prefixes=_longest(path, len(parts[0])))
        if node.end < len(ids_T):
            rest = ids_T[node.end :].copy()
            self.num_tokens += len(rest)
            leaf = _Node(rest, len(ids_T), item)
            node.children[int(rest[0])] = leaf
            node = leaf
            path.append(leaf)
        node.items.append(item)
        return placed

    def in_order(self) -> Sequence[tuple[int, int]]:
        """(item, tokens shared with the item before it), in lexicographic order of the sequences; equal sequences in
        the order in which they came."""
        found: list[tuple[int, int]] = []
        stack, shared = [(self._root, 0)], 0
        while stack:
            node, limit = stack.pop()
            shared = min(shared, limit)
            for item in node.items:
                found.append((item, shared))
                shared = node.end
            stack += [(node.children[token], node.end) for token in sorted(node.children, reverse=True)]
        return found

    def _take(self, parts: Sequence[IntArray]) -> int:
        """Make this the last sequence; returns how many tokens it shares with the one before. Copies only the others,
        so that this stays linear in what is new."""
        size, as_last, start = sum(map(len, parts)), 0, 0
        room_T = self._room_T if size <= len(self._room_T) else np.empty(2 * size, np.int32)
        for part in parts:
            num_equal = shared_length(self._last_T[start:], part) if as_last == start else 0
            as_last += num_equal
            room_T[start + num_equal : start + len(part)] = part[num_equal:]
            start += len(part)
        if room_T is not self._room_T:
            room_T[:as_last] = self._room_T[:as_last]
            self._room_T = room_T
        self._last_T = room_T[:size]
        return as_last


def _longest(path: Sequence[_Node], limit: int) -> Sequence[tuple[int, Sequence[int]]]:
    found: list[tuple[int, Sequence[int]]] = []
    for node in reversed(path):
        if node.items and 0 < node.end <= limit:
            found.append((node.end, tuple(node.items)))
            if len(found) == 2:
                break
    return found


def shared_length(a: IntArray, b: IntArray) -> int:
    """Length of the longest common prefix."""
    size = min(len(a), len(b))
    differs_T = a[:size] != b[:size]
    first = int(differs_T.argmax()) if size else 0
    return first if size and differs_T[first] else size


def _split(parent: _Node, child: _Node, size: int) -> _Node:
    """Cut a node after its first `size` tokens; returns the upper part."""
    upper = _Node(child.ids_T[:size], parent.end + size, child.owner)
    parent.children[int(child.ids_T[0])] = upper
    child.ids_T = child.ids_T[size:]
    upper.children[int(child.ids_T[0])] = child
    return upper
