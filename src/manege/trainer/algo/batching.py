"""Micro-batches: samples that fit the token budget of one forward and backward pass.

Nothing is dropped: a sample over the budget is a micro-batch of its own. Samples go in lexicographic order, so that
those with a common prefix meet in one micro-batch and the prefix tree can share it.
"""

from collections.abc import Iterable, Sequence

from manege.trainer.algo.token_tree import TokenTree
from manege.types import IntArray

__all__ = ["micro_batches"]


def micro_batches(sequences: Iterable[IntArray], max_tokens: int, *, share: bool) -> Sequence[Sequence[int]]:
    """Indices of the sequences of each micro-batch. `share`: count tokens of a common prefix once. Sequences are read
    one after the other, and only their distinct tokens are kept."""
    tree = TokenTree()
    lengths: list[int] = []
    for index, sequence in enumerate(sequences):
        tree.add(index, sequence)
        lengths.append(len(sequence))
    batches: list[list[int]] = []
    size = 0
    for index, num_shared in tree.in_order():
        num_new = lengths[index] - (num_shared if share and batches else 0)
        if batches and size + num_new <= max_tokens:
            batches[-1].append(index)
            size += num_new
        else:
            batches.append([index])
            size = lengths[index]
    return batches
