"""Micro-batches: samples that fit the token budget of one forward and backward pass.

Nothing is dropped: a sample over the budget is a micro-batch of its own. Samples go in lexicographic order, so that
those with a common prefix meet in one micro-batch and the prefix tree can share it.
"""

from collections.abc import Iterable, Sequence

from manege.trainer.algo.token_tree import TokenTree
from manege.types import IntArray

__all__ = ["cut", "lexicographic", "micro_batches"]


def micro_batches(sequences: Iterable[IntArray], max_tokens: int, *, share: bool) -> Sequence[Sequence[int]]:
    """Indices of the sequences of each micro-batch. `share`: count tokens of a common prefix once. Sequences are read
    one after the other, and only their distinct tokens are kept."""
    return cut(*lexicographic(sequences, share=share), max_tokens)


def lexicographic(sequences: Iterable[IntArray], *, share: bool) -> tuple[Sequence[tuple[int, int]], Sequence[int]]:
    """Indices in order, each with its tokens that the one before has not (`share`), or all of them; and all lengths."""
    tree = TokenTree()
    lengths: list[int] = []
    for index, sequence in enumerate(sequences):
        tree.add(index, sequence)
        lengths.append(len(sequence))
    return [(index, lengths[index] - (num_shared if share else 0)) for index, num_shared in tree.in_order()], lengths


def cut(order: Sequence[tuple[int, int]], lengths: Sequence[int], limit: int) -> Sequence[Sequence[int]]:
    """As few parts of the order as possible, of at most `limit` tokens each, but for one sequence that is longer."""
    parts: list[list[int]] = []
    size = 0
    for index, num_new in order:
        if parts and size + num_new <= limit:
            parts[-1].append(index)
            size += num_new
        else:
            parts.append([index])
            size = lengths[index]
    return parts
