"""Advantages, shaping, weights, micro-batches and the prefix tree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manege.trainer.algo.advantage import centred, group_advantages, grpo, is_constant, rloo, sample_advantages
from manege.trainer.algo.batching import micro_batches
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.returns import Earned, call_returns, return_advantages
from manege.trainer.algo.samples import build_samples
from manege.trainer.algo.shaping import overlong_penalty
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
        ("rloo", [1, 1, None], [0, 0, None]),
        ("centred", [0.7], [0]),
        ("grpo", [0.7], [0]),
        ("rloo", [0.7], [0]),
    ],
)
def test_advantages_by_hand(rule, rewards, expected):
    got = group_advantages(rewards, rule)
    assert got == [None if e is None else pytest.approx(e) for e in expected]


@pytest.mark.parametrize(
    ("function", "rewards", "expected"),
    [
        (centred, [1, 0, 0, 0], [3 / 4, -1 / 4, -1 / 4, -1 / 4]),
        (grpo, [1, 0], [0.5 / 0.51, -0.5 / 0.51]),
        (rloo, [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_the_examples_of_the_docstrings(function, rewards, expected):
    assert function(np.array(rewards, np.float64)) == pytest.approx(expected)


@pytest.mark.parametrize("rule", ["centred", "grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [0.0, *[0.95] * 7], [*[0.95] * 7, 0.95 + 1e-6]])
def test_nearly_equal_rewards_stay_bounded(rule, rewards):
    assert all(abs(a) < 10 for a in group_advantages(rewards, rule))


@pytest.mark.parametrize("rule", ["centred", "grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [1e6, 1e6 + 1e-9], [-3.0, -3.0], [5.0]])
def test_rewards_that_differ_by_rounding_give_exactly_zero(rule, rewards):
    assert set(group_advantages(rewards, rule)) == {0.0}


@pytest.mark.parametrize(
    ("values", "constant"), [([], True), ([1], True), ([0.5, 0.5], True), ([0.1 + 0.2, 0.3], True), ([0, 1e-6], False)]
)
def test_what_is_constant(values, constant):
    assert is_constant(np.array(values, np.float64)) == constant


def test_at_sample_level_a_rollout_counts_as_often_as_it_has_samples():
    got = sample_advantages([1, 0, None, 0.5], [3, 1, 2, 0], "centred")
    assert got == [[0.25] * 3, [-0.75], None, []]
    assert sample_advantages([1, 0], [1, 1], "grpo") == [[a] for a in group_advantages([1, 0], "grpo")]


CHAIN = Earned(reward=1.0, parents=[None, 0], call_rewards_C=[0.0, 2.0])
SILENT = Earned(reward=0.25, parents=[], call_rewards_C=[])


def test_returns_by_hand():
    assert call_returns(CHAIN, 0.5) == [1.5, 3.0]
    assert return_advantages([CHAIN, SILENT], 0.5) == [[0.25, 1.75], []]


def test_a_reward_counts_for_the_calls_that_led_to_it_and_for_no_other_branch():
    # 0 <- 1 <- 3 and 0 <- 2: 3 earned 8, 2 earned 1, the rollout 4.
    earned = Earned(reward=4.0, parents=[None, 0, 0, 1], call_rewards_C=[0.0, 0.0, 1.0, 8.0])
    assert call_returns(earned, 0.5) == [0.5 * 1 + 0.25 * 8 + 0.25 * 4, 0.5 * 8 + 0.5 * 4, 1 + 4, 8 + 4]
    later_is_deeper = Earned(reward=4.0, parents=[None, 0, 0, 2], call_rewards_C=[0.0] * 4)
    assert call_returns(later_is_deeper, 0.5) == [1, 4, 2, 4]


def test_a_rollout_counts_once_in_the_baseline_of_returns_however_many_calls_it_has():
    long = Earned(reward=1.0, parents=[None, *range(9)], call_rewards_C=[0.0] * 10)
    short = Earned(reward=0.0, parents=[None], call_rewards_C=[0.0])
    assert return_advantages([long, short], 1.0) == [[0.5] * 10, [-0.5]]


PARENTS = st.integers(0, 6).flatmap(
    lambda size: st.tuples(*(st.none() if i == 0 else st.none() | st.integers(0, i - 1) for i in range(size)))
)


@given(st.lists(st.tuples(st.none() | st.integers(-4, 4).map(float), PARENTS), min_size=1, max_size=6))
def test_returns_without_call_rewards_and_discount_are_centred(rollouts):
    group = [Earned(reward=r, parents=parents, call_rewards_C=[0.0] * len(parents)) for r, parents in rollouts]
    expected = group_advantages([reward for reward, _ in rollouts], "centred")
    for row, advantage, (_, parents) in zip(return_advantages(group, 1.0), expected, rollouts, strict=True):
        assert row == (None if advantage is None else pytest.approx([advantage] * len(parents)))


@given(
    st.floats(0.1, 1),
    st.lists(st.tuples(PARENTS, st.integers(0, 99)), min_size=1, max_size=4),
)
def test_returns_are_what_their_definition_says(discount, rollouts):
    for parents, seed in rollouts:
        rewards = np.random.default_rng(seed).integers(-3, 4, len(parents)).astype(float).tolist()
        got = call_returns(Earned(reward=2.0, parents=parents, call_rewards_C=rewards), discount)
        for call, value in enumerate(got):
            below = {other: path.index(call) for other in range(len(parents)) if call in (path := _up(parents, other))}
            expected = sum(discount**steps * rewards[other] for other, steps in below.items())
            assert value == pytest.approx(expected + discount ** max(below.values()) * 2.0)


def _up(parents, call):
    path = [call]
    while parents[path[-1]] is not None:
        path.append(parents[path[-1]])
    return path


def test_without_a_verdict_rewards_of_calls_count_for_nothing():
    judged = Earned(reward=1.0, parents=[None], call_rewards_C=[1.0])
    unjudged = Earned(reward=None, parents=[None], call_rewards_C=[9.0])
    assert return_advantages([judged, unjudged], 1.0) == [[0.0], None]


@pytest.mark.parametrize(
    ("num_tokens", "buffer", "penalty"), [(80, 20, 0), (90, 20, 0.25), (100, 20, 0.5), (150, 20, 0.5), (99, 1, 0)]
)
def test_the_overlong_penalty_by_hand(num_tokens, buffer, penalty):
    assert overlong_penalty(num_tokens, limit=100, buffer=buffer, penalty=0.5) == pytest.approx(penalty)


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
