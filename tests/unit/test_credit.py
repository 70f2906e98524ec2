"""Advantages, weights, micro-batches and the prefix tree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manege.trainer.algo.advantage import group_advantages
from manege.trainer.algo.batching import micro_batches
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.trainer.algo.tree import build_tree
from manege.trainer.algo.weights import sample_weights
from tests.calls import make_call


@pytest.mark.parametrize(
    ("rule", "rewards", "expected"),
    [
        ("centred", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("centred", [1, 3, 2, None], [-1, 1, 0, None]),
        ("centred", [None, None], [None, None]),
        ("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("rloo", [1, None], [0, None]),
        ("grpo", [1, 0], [0.5 / 0.51, -0.5 / 0.51]),
        ("grpo", [0.5] * 4, [0, 0, 0, 0]),
    ],
)
def test_advantages_by_hand(rule, rewards, expected):
    got = group_advantages(rewards, rule)
    assert got == [None if e is None else pytest.approx(e) for e in expected]


@pytest.mark.parametrize("rule", ["grpo", "rloo"])
def test_nearly_equal_rewards_stay_bounded(rule):
    assert all(abs(a) < 10 for a in group_advantages([0.95] * 7 + [0.0], rule))


def _samples(shapes):
    """One sample per (rollout, trained tokens)."""
    return [
        [build_samples(build_forest([make_call("c", [1, 2], [3] * n, rollout=str(i))]))[0][0] for n in sizes]
        for i, sizes in enumerate(shapes)
    ]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("rollout_mean", [[1 / 12, 1 / 12], [1 / 6], []]),
        ("token_mean", [[1 / 6, 1 / 6], [1 / 6], []]),
        ("constant", [[1 / 30, 1 / 30], [1 / 30], []]),
        ("sample_mean", [[1 / 9, 1 / 3], [1 / 6], []]),
    ],
)
def test_weights_by_hand(rule, expected):
    rollouts = _samples([[3, 1], [2], []])
    assert sample_weights(rollouts, rule, constant_tokens=10) == [[pytest.approx(w) for w in row] for row in expected]


SEQUENCES = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda x: np.array(x, np.int32)), min_size=1
)


@given(SEQUENCES)
def test_tree_gives_every_sequence_back_and_shares_every_prefix(sequences):
    tree = build_tree(sequences)
    for sequence, nodes in zip(sequences, tree.sequences, strict=True):
        assert np.array_equal(tree.ids_N[nodes], sequence)
        assert np.array_equal(tree.positions_N[nodes], np.arange(len(sequence)))
    distinct = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
    assert len(tree.ids_N) == len(distinct)
    assert [n for s in tree.segments for n in range(s.start, s.stop)] == list(range(len(tree.ids_N)))


@given(SEQUENCES, st.integers(1, 20), st.booleans())
def test_micro_batches_drop_nothing_and_keep_the_budget(sequences, budget, share):
    batches = micro_batches(sequences, budget, share=share)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sequences)))
    for batch in batches:
        chosen = [sequences[i] for i in batch]
        size = len(build_tree(chosen).ids_N) if share else sum(map(len, chosen))
        assert size <= budget or len(batch) == 1
