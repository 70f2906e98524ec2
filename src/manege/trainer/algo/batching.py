"""Micro-batches: samples that fit the token budget of one forward and backward pass.

Nothing is dropped: a sample over the budget is a micro-batch of its own. Samples go in lexicographic order, so that
those with a common prefix meet in one micro-batch and the prefix tree can share it.
"""

from collections.abc import Sequence

from manege.trainer.algo.tree import prefix_order, shared_length
from manege.types import IntArray

__all__ = ["micro_batches"]


def micro_batches(sequences: Sequence[IntArray], max_tokens: int, *, share: bool) -> Sequence[Sequence[int]]:
    """Indices of the sequences of each micro-batch. `share`: count tokens of a common prefix once."""
    batches: list[list[int]] = []
    size = 0
    for index in prefix_order(sequences):
        sequence = sequences[index]
        if batches:
            shared = shared_length(sequences[batches[-1][-1]], sequence) if share else 0
            if size + len(sequence) - shared <= max_tokens:
                batches[-1].append(index)
                size += len(sequence) - shared
                continue
        batches.append([index])
        size = len(sequence)
    return batches
