"""The tree of tokens against its definition, by comparing every pair."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from manege.trainer.algo.token_tree import TokenTree, shared_length

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=8).map(lambda x: np.array(x, np.int32)), max_size=12)


def common(a, b):
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(SEQUENCES)
def test_a_sequence_meets_exactly_what_came_before(sequences):
    tree = TokenTree()
    for number, sequence in enumerate(sequences):
        cut = number % (len(sequence) + 1)
        placed = tree.add(number, sequence[:cut], sequence[cut:])
        earlier = sequences[:number]
        assert placed.num_shared == max((common(sequence, other) for other in earlier), default=0)
        if placed.num_shared:
            assert common(sequence, sequences[placed.nearest]) == placed.num_shared
        else:
            assert placed.nearest is None
        want = {}
        for index, other in enumerate(earlier):
            if len(other) and common(sequence[:cut], other) == len(other):
                want.setdefault(len(other), []).append(index)
        assert [(length, list(items)) for length, items in placed.prefixes] == sorted(want.items(), reverse=True)[:2]
    assert tree.num_tokens == len({tuple(s[: n + 1]) for s in sequences for n in range(len(s))})


@given(SEQUENCES)
def test_order_is_lexicographic_and_neighbours_share_most(sequences):
    tree = TokenTree()
    for number, sequence in enumerate(sequences):
        tree.add(number, sequence)
    order = tree.in_order()
    assert [n for n, _ in order] == sorted(range(len(sequences)), key=lambda n: (sequences[n].tolist(), n))
    seen = []
    for number, shared in order:
        assert shared == max((common(sequences[number], other) for other in seen), default=0)
        seen.append(sequences[number])


@given(SEQUENCES.filter(lambda s: len(s) > 1))
def test_shared_length_is_that_of_the_common_prefix(sequences):
    assert shared_length(sequences[0], sequences[1]) == common(sequences[0], sequences[1])


def test_the_tree_keeps_no_array_that_it_was_given():
    tree, sequence = TokenTree(), np.arange(5, dtype=np.int32)
    tree.add(0, sequence)
    sequence[:] = 9
    assert tree.add(1, sequence).num_shared == 0
    assert tree.add(2, np.arange(5, dtype=np.int32)).num_shared == 5
