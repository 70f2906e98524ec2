"""Micro-batches: samples that fit the token budget of one forward and backward pass.

Nothing is dropped: a sample over the budget is a micro-batch of its own. Samples go in lexicographic order, so that
those with a common prefix meet in one micro-batch and the prefix tree can share it.
"""

from collections.abc import Sequence

from manege.trainer.algo.tree import in_prefix_order
from manege.types import IntArray

__all__ = ["micro_batches"]


def micro_batches(sequences: Sequence[IntArray], max_tokens: int, *, share: bool) -> Sequence[Sequence[int]]:
    """Indices of the sequences of each micro-batch. `share`: count tokens of a common prefix once."""
    batches: list[list[int]] = []
    size = 0
    for index, num_shared in in_prefix_order(sequences):
        num_new = len(sequences[index]) - (num_shared if share and batches else 0)
        if batches and size + num_new <= max_tokens:
            batches[-1].append(index)
            size += num_new
        else:
            batches.append([index])
            size = len(sequences[index])
    return batches
