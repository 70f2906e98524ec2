"""pass@k and its intervals."""

import itertools
import math
import random

import pytest

from manege.trainer.evaluate import wilson
from manege.trainer.passing import pass_at, pass_rates


@pytest.mark.parametrize("num", [1, 4, 6])
def test_the_estimate_is_the_share_of_draws_with_a_success(num):
    for num_success, k in itertools.product(range(num + 1), range(1, num + 1)):
        rollouts = [1] * num_success + [0] * (num - num_success)
        draws = list(itertools.combinations(rollouts, k))
        assert pass_at(k, num=num, num_success=num_success) == pytest.approx(sum(map(max, draws)) / len(draws))


def test_many_rollouts_are_counted_exactly():
    assert pass_at(100, num=1000, num_success=5) == pytest.approx(
        1 - math.prod((995 - each) / (1000 - each) for each in range(100))
    )


def test_rates_are_for_powers_of_two_and_all():
    assert [rate.k for rate in pass_rates([0, 3], 6)] == [1, 2, 4, 6]
    assert [rate.k for rate in pass_rates([1, 0], 1)] == [1]


def test_one_rollout_per_task_gives_the_interval_of_a_share():
    (rate,) = pass_rates([1, 0, 0, 1, 1], 1)
    assert (rate.rate, rate.low, rate.high, rate.method) == (0.6, *wilson(3, 5), "wilson")


def test_nothing_solved_is_not_certainly_nothing():
    assert [(rate.low, rate.method) for rate in pass_rates([0] * 20, 4)] == [(0.0, "wilson")] * 3
    assert all(rate.high > 0.1 for rate in pass_rates([0] * 20, 4))


def test_rollouts_of_one_task_are_no_independent_evidence():
    """Ten rollouts each of which says the same is no more than one."""
    clustered = pass_rates([9, 1] * 15, 10)[0]
    low, high = wilson(15, 30)
    assert clustered.method == "bootstrap"
    assert clustered.high - clustered.low == pytest.approx(0.8 * (high - low), abs=0.03)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Tasks of uniform skill, so that pass@1 is a half and pass@2 two thirds."""
    rng, covered, num_trials = random.Random(0), {1: 0, 2: 0}, 100
    for _ in range(num_trials):
        skills = [rng.random() for _ in range(50)]
        successes = [sum(rng.random() < skill for _ in range(4)) for skill in skills]
        for rate in pass_rates(successes, 4)[:2]:
            truth = {1: 1 / 2, 2: 2 / 3}[rate.k]
            covered[rate.k] += rate.low <= truth <= rate.high
    assert all(0.88 <= count / num_trials <= 0.99 for count in covered.values())
