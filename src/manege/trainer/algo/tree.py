"""The prefix tree of some samples: tokens that they share as a prefix become one node and are computed once.

In: token sequences. Out: nodes laid out flat, in segments: a segment is the run of nodes that one sequence adds to the
tree. Nodes of a segment see the segment's prefix nodes and, causally, each other. Since a hidden state depends only on
the tokens up to it, every sequence reads its own states through `nodes_T`, and any loss per sequence stays exact.

Worked example: sequences a b c and a b d e -> nodes a b c | d e; segments [0, 3) with prefix (), [3, 5) with prefix
(0, 1); the second sequence reads its states at nodes 0 1 3 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manege.types import IntArray

__all__ = ["PrefixTree", "Segment", "build_tree", "prefix_order", "separate", "shared_length"]

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Nodes [start, stop) and the nodes before them that they see."""

    start: int
    stop: int
    prefix: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """N nodes; `sequences[i]` are the nodes of the i-th sequence, in order."""

    ids_N: IntArray
    positions_N: IntArray
    segments: Sequence[Segment]
    sequences: Sequence[Indices]


def prefix_order(sequences: Sequence[IntArray]) -> Sequence[int]:
    """Indices in lexicographic order: sequences with a common prefix become neighbours."""
    return sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">u4").tobytes())


def shared_length(a: IntArray, b: IntArray) -> int:
    """Length of the longest common prefix."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def build_tree(sequences: Sequence[IntArray]) -> PrefixTree:
    """In lexicographic order, a sequence shares with the tree so far exactly what it shares with its neighbour."""
    return _lay_out(sequences, share=True)


def separate(sequences: Sequence[IntArray]) -> PrefixTree:
    """The same layout without sharing, for engines and models that cannot share."""
    return _lay_out(sequences, share=False)


def _lay_out(sequences: Sequence[IntArray], *, share: bool) -> PrefixTree:
    nodes: list[Indices] = [np.empty(0, np.int64)] * len(sequences)
    ids, positions, segments = [], [], []
    size = 0
    previous: int | None = None
    for index in prefix_order(sequences):
        sequence = sequences[index]
        shared = 0 if previous is None or not share else shared_length(sequences[previous], sequence)
        prefix = nodes[previous][:shared] if previous is not None else np.empty(0, np.int64)
        num_new = len(sequence) - shared
        nodes[index] = np.concatenate([prefix, np.arange(size, size + num_new)])
        if num_new:
            segments.append(Segment(start=size, stop=size + num_new, prefix=prefix))
            ids.append(sequence[shared:])
            positions.append(np.arange(shared, len(sequence), dtype=np.int32))
        size += num_new
        previous = index
    empty = [np.empty(0, np.int32)]
    return PrefixTree(
        ids_N=np.concatenate(ids or empty).astype(np.int32),
        positions_N=np.concatenate(positions or empty),
        segments=segments,
        sequences=nodes,
    )
