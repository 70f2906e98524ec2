"""The calls of one attempt as a forest: each call's parent is the call that it continues.

In: calls in the order in which they were answered. Out: the same calls, each with the index of its parent or None.
The parent is the earlier call whose `prompt + response` is the longest proper prefix of the prompt; among equals the
one that the gateway recorded, then a delivered one, then the latest. What the gateway recorded is only a hint: tokens
decide.

Linear in the tokens: prefixes are compared by hashes that are sums of mixed ids times powers of an odd number, modulo
2^64, so that the hashes of all prefixes of a prompt are one cumulative sum. A hit is confirmed by comparing the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manege.types import Call, Delivered, IntArray

__all__ = ["Forest", "build_forest"]

_BASE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Parallel sequences over the calls of one attempt."""

    calls: Sequence[Call]
    parents: Sequence[int | None]
    """Index into `calls`, always smaller than the child's own."""

    def __post_init__(self) -> None:
        for child, parent in zip(range(len(self.calls)), self.parents, strict=True):
            assert parent is None or parent < child

    def leaves(self) -> Sequence[int]:
        """Calls that nothing continued, in order."""
        inner = {parent for parent in self.parents if parent is not None}
        return [index for index in range(len(self.calls)) if index not in inner]

    def path(self, index: int) -> Sequence[int]:
        """From the root to this call."""
        path = [index]
        while (parent := self.parents[path[-1]]) is not None:
            path.append(parent)
        return path[::-1]


def build_forest(calls: Sequence[Call]) -> Forest:
    """Find every call's parent."""
    longest = max((len(call.prompt_ids_P) + len(call.response_ids_R) for call in calls), default=0)
    powers_T = np.cumprod(np.full(longest + 1, _BASE, np.uint64))
    ended: dict[tuple[int, int], list[int]] = {}  # (length, hash) of prompt + response -> calls
    parents: list[int | None] = []
    for index, call in enumerate(calls):
        full_T = np.concatenate([call.prompt_ids_P, call.response_ids_R])
        prefix_hash_T = np.cumsum(_mix(full_T) * powers_T[: len(full_T)], dtype=np.uint64)
        parents.append(_find_parent(calls, index, prefix_hash_T, ended))
        if len(full_T):
            ended.setdefault((len(full_T), int(prefix_hash_T[-1])), []).append(index)
    return Forest(calls=calls, parents=parents)


def _find_parent(
    calls: Sequence[Call],
    index: int,
    prefix_hash_T: npt.NDArray[np.uint64],
    ended: dict[tuple[int, int], list[int]],
) -> int | None:
    call = calls[index]
    lengths = sorted({length for length, _ in ended if length < len(call.prompt_ids_P)}, reverse=True)
    for length in lengths:
        candidates = [
            candidate
            for candidate in ended.get((length, int(prefix_hash_T[length - 1])), [])
            if _is_prefix(calls[candidate], call.prompt_ids_P)
        ]
        if candidates:
            return max(candidates, key=lambda c: (calls[c].id == call.parent, calls[c].delivered == Delivered.YES, c))
    return None


def _is_prefix(earlier: Call, prompt_P: IntArray) -> bool:
    split, end = len(earlier.prompt_ids_P), len(earlier.prompt_ids_P) + len(earlier.response_ids_R)
    return np.array_equal(earlier.prompt_ids_P, prompt_P[:split]) and np.array_equal(
        earlier.response_ids_R, prompt_P[split:end]
    )


def _mix(ids_T: IntArray) -> npt.NDArray[np.uint64]:
    """Spread small ids over 64 bits, so that sums of them do not collide (the finaliser of splitmix64)."""
    x = ids_T.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
