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

from manege.trainer.algo.token_tree import TokenTree
from manege.types import IntArray

__all__ = ["PrefixTree", "Segment", "build_tree", "separate"]

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


def build_tree(sequences: Sequence[IntArray]) -> PrefixTree:
    """Every shared prefix is computed once."""
    return _lay_out(sequences, share=True)


def separate(sequences: Sequence[IntArray]) -> PrefixTree:
    """The same layout without sharing, for engines and models that cannot share."""
    return _lay_out(sequences, share=False)


def _in_prefix_order(sequences: Sequence[IntArray]) -> Sequence[tuple[int, int]]:
    """(index, tokens shared with the sequence before it), in lexicographic order: sequences with a common prefix become
    neighbours, and a sequence shares with all that came before it exactly what it shares with its neighbour."""
    tree = TokenTree()
    for index, sequence in enumerate(sequences):
        tree.add(index, sequence)
    return tree.in_order()


def _lay_out(sequences: Sequence[IntArray], *, share: bool) -> PrefixTree:
    nodes: list[Indices] = [np.empty(0, np.int64)] * len(sequences)
    ids, positions, segments = [np.empty(0, np.int32)], [np.empty(0, np.int32)], []
    size, before = 0, np.empty(0, np.int64)
    for index, num_shared in _in_prefix_order(sequences):
        sequence = sequences[index]
        prefix = before[: num_shared if share else 0]
        num_new = len(sequence) - len(prefix)
        nodes[index] = before = np.concatenate([prefix, np.arange(size, size + num_new)])
        if num_new:
            segments.append(Segment(start=size, stop=size + num_new, prefix=prefix))
            ids.append(sequence[len(prefix) :])
            positions.append(np.arange(len(prefix), len(sequence), dtype=np.int32))
        size += num_new
    return PrefixTree(
        ids_N=np.concatenate(ids), positions_N=np.concatenate(positions), segments=segments, sequences=nodes
    )
