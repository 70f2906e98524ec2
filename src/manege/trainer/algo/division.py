"""Shares of a batch for data-parallel ranks: whole samples, with as equal a number of distinct tokens as can be.

Samples go in lexicographic order and are cut there, so that those with a common prefix stay together and the prefix is
computed by one rank, but where a cut falls between them. With four samples AB1, AB2, C1, C2 and two ranks, the shares
are (AB1, AB2) and (C1, C2).
"""

from collections.abc import Iterable, Sequence

from manege.trainer.algo.batching import cut, lexicographic
from manege.types import IntArray

__all__ = ["divide"]


def divide(sequences: Iterable[IntArray], num_shares: int, *, share: bool) -> Sequence[Sequence[int]]:
    """Indices of the sequences of each share; of all cuts of the order, one whose largest share is smallest. `share`:
    tokens of a common prefix are computed once. Where sequences are fewer than shares, some are empty."""
    order, lengths = lexicographic(sequences, share=share)
    low, high = max(lengths, default=0), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        if len(cut(order, lengths, middle)) <= num_shares:
            high = middle
        else:
            low = middle + 1
    shares = cut(order, lengths, high)
    return [*shares, *([] for _ in range(num_shares - len(shares)))]
