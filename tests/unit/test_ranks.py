"""Shares of a batch: nothing lost, common prefixes together, the largest share as small as whole samples allow."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manege.trainer.algo.division import divide
from manege.trainer.algo.token_tree import TokenTree

SEQUENCES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), max_size=7)


def arrays(sequences):
    return [np.asarray(sequence, np.int32) for sequence in sequences]


def cost(sequences, share):
    """Tokens that a rank computes for these."""
    if not share:
        return sum(map(len, sequences))
    tree = TokenTree()
    for index, sequence in enumerate(sequences):
        tree.add(index, sequence)
    return tree.num_tokens


def largest(sequences, shares, share):
    return max((cost([sequences[i] for i in part], share) for part in shares), default=0)


@settings(deadline=None, max_examples=60)
@given(sequences=SEQUENCES, num_shares=st.integers(1, 4), share=st.booleans())
def test_every_sample_is_in_one_share_and_no_cut_of_the_order_is_better(sequences, num_shares, share):
    sequences = arrays(sequences)
    shares = divide(sequences, num_shares, share=share)
    assert len(shares) == num_shares
    assert sorted(itertools.chain(*shares)) == list(range(len(sequences)))
    order = [index for index, _ in sorted(enumerate(sequences), key=lambda item: (item[1].tolist(), item[0]))]
    cuts = itertools.combinations_with_replacement(range(len(order) + 1), num_shares - 1)
    best = min(
        largest(sequences, [order[a:b] for a, b in itertools.pairwise([0, *cut, len(order)])], share) for cut in cuts
    )
    assert largest(sequences, shares, share) == best


def test_samples_with_a_common_prefix_stay_together():
    a, b = list(range(100, 140)), list(range(200, 240))
    shares = divide(arrays([[*a, 1], [*b, 1], [*a, 2], [*b, 2]]), 2, share=True)
    assert sorted(map(sorted, shares)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("lengths", "sizes"), [([], [0, 0, 0]), ([5], [1, 0, 0]), ([9, 1, 1, 1], [1, 3, 0])])
def test_ranks_may_get_nothing(lengths, sizes):
    sequences = arrays([[index + 1] * length for index, length in enumerate(lengths)])
    shares = divide(sequences, 3, share=True)
    assert sorted(map(len, shares)) == sorted(sizes)
    assert largest(sequences, shares, share=True) == max(lengths, default=0)
