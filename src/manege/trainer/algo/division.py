"""Shares of a batch for data-parallel ranks: whole samples, with as equal a number of distinct tokens as can be.

Samples go in lexicographic order and are cut there, so that those with a common prefix stay together and the prefix is
computed by one rank, but where a cut falls between them. With four samples AB1, AB2, C1, C2 and two ranks, the shares
are (AB1, AB2) and (C1, C2).
"""

from collections.abc import Iterable, Sequence

from manege.trainer.algo.token_tree import TokenTree
from manege.types import IntArray

__all__ = ["divide"]


def divide(sequences: Iterable[IntArray], num_shares: int, *, share: bool) -> Sequence[Sequence[int]]:
    """Indices of the sequences of each share; of all cuts of the order, one whose largest share is smallest. `share`:
    tokens of a common prefix are computed once. Where sequences are fewer than shares, some are empty."""
    tree = TokenTree()
    lengths: list[int] = []
    for index, sequence in enumerate(sequences):
        tree.add(index, sequence)
        lengths.append(len(sequence))
    order = [(index, lengths[index] - (num_shared if share else 0)) for index, num_shared in tree.in_order()]
    low, high = max(lengths, default=0), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        if len(_cut(order, lengths, middle)) <= num_shares:
            high = middle
        else:
            low = middle + 1
    shares = _cut(order, lengths, high)
    return [*shares, *([] for _ in range(num_shares - len(shares)))]


def _cut(order: Sequence[tuple[int, int]], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """As few shares as possible of at most `limit` tokens each; it is no less than the longest sequence."""
    shares: list[list[int]] = []
    size = 0
    for index, num_new in order:
        if shares and size + num_new <= limit:
            shares[-1].append(index)
            size += num_new
        else:
            shares.append([index])
            size = lengths[index]
    return shares
