"""Calls to forest to samples: the golden rollouts, branches, retries, and the ledger."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manege.errors import TrainerError
from manege.trainer.algo.fates import SampleRules
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.ledger import Fate, Ledger, Reason
from manege.trainer.algo.samples import build_samples
from manege.types import Delivered
from tests.calls import make_call

GOLDEN = json.loads(gzip.decompress((Path(__file__).parents[1] / "golden" / "rollouts.json.gz").read_bytes()))
NUM_SAMPLES = {
    "linear": 1,
    "drift at 2 of 8 turns": 3,
    "drift at every turn": 8,
    "reasoning stripped each turn": 8,
    "one answer rewritten by harness": 2,
    "2 interleaved conversations": 2,
    "parent + 3 parallel sub-agents": 4,
    "compaction once": 2,
    "4 equal prompts, all used": 4,
    "system nonce each call": 8,
    "3 shared turns, then 2 different continuations": 2,
}


@pytest.mark.parametrize(
    "scenario", [s for s in GOLDEN["scenarios"] if s["name"] in NUM_SAMPLES], ids=lambda s: s["name"]
)
def test_golden_rollout_gives_its_samples_and_trains_every_token_once(scenario):
    calls = [
        make_call(str(i), call["prompt_token_ids"], call["response_token_ids"])
        for i, call in enumerate(scenario["calls"])
    ]
    samples, ledger = build_samples(build_forest(calls))
    assert len(samples) == NUM_SAMPLES[scenario["name"]]
    assert ledger.trained == ledger.sampled == sum(len(call.response_ids_R) for call in calls)
    assert sum(sample.num_trained for sample in samples) == ledger.sampled


@pytest.mark.parametrize("delivered", [Delivered.NO, Delivered.UNKNOWN])
@pytest.mark.parametrize("name", ["client retry, 2nd kept", "client retry, 1st kept"])
def test_lost_answer_of_a_retry_is_dead(name, delivered):
    scenario = next(s for s in GOLDEN["scenarios"] if s["name"] == name)
    calls = [
        make_call(
            str(i),
            call["prompt_token_ids"],
            call["response_token_ids"],
            delivered=Delivered.YES if call["kept_by_harness"] else delivered,
        )
        for i, call in enumerate(scenario["calls"])
    ]
    lost = sum(len(call["response_token_ids"]) for call in scenario["calls"] if not call["kept_by_harness"])
    samples, ledger = build_samples(build_forest(calls))
    assert len(samples) == 1
    assert ledger.of(Fate.DEAD) == lost > 0


def test_shared_turn_is_trained_once_and_is_context_elsewhere():
    calls = [
        make_call("a", [1, 2], [3]),
        make_call("b", [1, 2, 3, 4], [5]),
        make_call("c", [1, 2, 3, 6], [7, 8]),
    ]
    samples, ledger = build_samples(build_forest(calls))
    assert [sample.mask_T.tolist() for sample in samples] == [
        [False, False, True, False, True],
        [False, False, False, False, True, True],
    ]
    assert (ledger.trained, ledger.context) == (4, 1)


def test_tokens_decide_against_a_wrong_recorded_parent():
    calls = [make_call("a", [1], [2]), make_call("b", [9], [9]), make_call("c", [1, 2, 3], [4], parent="b")]
    assert build_forest(calls).parents == [None, None, 0]


def test_recorded_parent_breaks_a_tie_between_equal_answers():
    calls = [make_call("a", [1], [2]), make_call("b", [1], [2]), make_call("c", [1, 2, 3], [4], parent="a")]
    assert build_forest(calls).parents == [None, None, 0]


def test_call_that_only_a_dead_answer_continued_is_still_trained():
    calls = [make_call("a", [1], [2]), make_call("b", [1, 2, 3], [4], delivered=Delivered.NO)]
    samples, ledger = build_samples(build_forest(calls))
    assert [sample.ids_T.tolist() for sample in samples] == [[1, 2]]
    assert (ledger.trained, ledger.of(Fate.DEAD)) == (1, 1)


def test_broken_logprobs_are_excluded_and_counted():
    calls = [make_call("a", [1], [2, 3], logprobs=[-1.0, float("nan")]), make_call("b", [1, 2, 3, 4], [5])]
    samples, ledger = build_samples(build_forest(calls))
    assert ledger.tokens[Reason.NO_LOGPROBS] == 2
    assert samples[0].mask_T.tolist() == [False, False, False, False, True]


def test_versions_follow_the_tokens_into_the_sample():
    calls = [make_call("a", [1], [2], version=1), make_call("b", [1, 2, 3], [4], version=2)]
    [sample], _ = build_samples(build_forest(calls))
    assert sample.versions_M.tolist() == [1, 2]


def test_a_ledger_that_does_not_add_up_stops_the_step():
    with pytest.raises(TrainerError, match="add up"):
        Ledger(sampled=3, tokens={Reason.TRAINED: 1, Reason.RETRIED: 1}, calls={}, context=0)


@given(st.lists(st.tuples(st.integers(-1, 6), st.lists(st.integers(0, 3), max_size=3), st.booleans()), max_size=12))
def test_every_sampled_token_has_one_fate_on_random_forests(moves):
    calls = []
    for number, (parent, extra, delivered) in enumerate(moves):
        base = [] if parent < 0 or parent >= len(calls) else _full(calls[parent])
        prompt = [*base, 7, *extra]
        calls.append(
            make_call(str(number), prompt, [8] * (number % 3), delivered=Delivered.YES if delivered else Delivered.NO)
        )
    samples, ledger = build_samples(build_forest(calls))
    assert ledger.trained == sum(sample.num_trained for sample in samples)
    by_id = {call.id: call for call in calls}
    for sample in samples:
        last = by_id[sample.call_ids[-1]]
        assert np.array_equal(sample.ids_T, _full(last))


def _full(call):
    return [*call.prompt_ids_P.tolist(), *call.response_ids_R.tolist()]


def test_constrained_and_unwanted_side_calls_are_excluded_and_accounted_for():
    main = make_call("main", [1, 2], [3, 4])
    title = make_call("title", [7], [8], thread="side:title")
    forced = make_call("forced", [1, 2, 3, 4, 5], [6], constrained=True)
    forest = build_forest([main, title, forced])
    samples, ledger = build_samples(forest)
    assert sorted(call for sample in samples for call in sample.call_ids) == ["forced", "main", "title"]
    assert (ledger.trained, ledger.tokens[Reason.CONSTRAINED]) == (3, 1)
    [sample], ledger = build_samples(forest, SampleRules(side_calls=False))
    assert sample.mask_T.tolist() == [False, False, True, True, False, False]
    assert ledger.tokens == {Reason.TRAINED: 2, Reason.SIDE_CALL: 1, Reason.CONSTRAINED: 1}
