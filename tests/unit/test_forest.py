"""Calls to forest: parents by the longest prefix, on random calls and on the golden rollouts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.types import Delivered
from tests.calls import make_call
from tests.golden_rollouts import NUM_SAMPLES, golden_calls


@pytest.mark.parametrize("name", NUM_SAMPLES)
def test_golden_rollout_gives_its_samples_and_trains_every_token_once(name):
    calls = golden_calls(name)
    samples, ledger = build_samples(build_forest(calls))
    assert len(samples) == NUM_SAMPLES[name]
    assert ledger.trained == ledger.sampled == sum(len(call.response_ids_R) for call in calls)
    assert sum(sample.num_trained for sample in samples) == ledger.sampled


def test_tokens_decide_against_a_wrong_recorded_parent():
    calls = [make_call("a", [1], [2]), make_call("b", [9], [9]), make_call("c", [1, 2, 3], [4], parent="b")]
    assert build_forest(calls).parents == [None, None, 0]


def test_ties_go_to_the_recorded_parent_then_to_a_delivered_one_then_to_the_latest():
    lost, kept, later = (
        make_call("lost", [1], [2], delivered=Delivered.UNKNOWN),
        make_call("kept", [1], [2]),
        make_call("later", [1], [2], delivered=Delivered.UNKNOWN),
    )
    earlier = [lost, kept, later]
    assert build_forest([*earlier, make_call("c", [1, 2, 3], [4], parent="lost")]).parents[3] == 0
    assert build_forest([*earlier, make_call("c", [1, 2, 3], [4])]).parents[3] == 1
    assert build_forest([lost, later, make_call("c", [1, 2, 3], [4])]).parents[2] == 1


def test_an_answer_that_the_agent_has_continued_is_a_parent_and_an_empty_one_is_not():
    assert build_forest([make_call("a", [1], [2]), make_call("b", [1, 2], [3])]).parents == [None, 0]
    assert build_forest([make_call("a", [1], []), make_call("b", [1], [3])]).parents == [None, None]


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 1), max_size=3), st.integers(0, 2)), max_size=14))
def test_the_parent_is_the_longest_prefix_of_the_prompt(moves):
    calls = []
    for number, (base, extra, size) in enumerate(moves):
        start = full(calls[base]) if base < len(calls) else []
        calls.append(make_call(str(number), [*start, *extra], [1] * size))
    forest = build_forest(calls)
    for number, call in enumerate(calls):
        prompt = call.prompt_ids_P.tolist()
        lengths = [
            len(full(earlier))
            for earlier in calls[:number]
            if full(earlier) == prompt[: len(full(earlier))]
            and full(earlier)
            and (len(full(earlier)) < len(prompt) or len(earlier.response_ids_R))
        ]
        parent = forest.parents[number]
        assert (len(full(calls[parent])) if parent is not None else 0) == max(lengths, default=0)
    distinct = {tuple(full(call)[: n + 1]) for call in calls for n in range(len(full(call)))}
    assert forest.num_unique == len(distinct)


def full(call):
    return np.concatenate([call.prompt_ids_P, call.response_ids_R]).tolist()
