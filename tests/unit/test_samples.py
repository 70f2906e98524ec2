"""Forest to samples: every sampled token has one fate with its reason, and what is trained is trained once."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manege.errors import TrainerError
from manege.trainer.algo.fates import SampleRules
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.ledger import Fate, Ledger, Reason, sum_ledgers
from manege.trainer.algo.samples import build_samples
from manege.types import Delivered, FinishReason, VersionSpan
from tests.calls import make_call
from tests.golden_rollouts import SCENARIOS, golden_calls


def build(calls, **rules):
    return build_samples(build_forest(calls), SampleRules(**rules))


@pytest.mark.parametrize("lost", [Delivered.NO, Delivered.UNKNOWN])
@pytest.mark.parametrize("name", ["client retry, 2nd kept", "client retry, 1st kept"])
def test_lost_answer_of_a_retry_is_dead(name, lost):
    size = sum(len(call["response_token_ids"]) for call in SCENARIOS[name] if not call["kept_by_harness"])
    samples, ledger = build(golden_calls(name, lost=lost))
    assert len(samples) == 1
    reason = Reason.NOT_DELIVERED if lost is Delivered.NO else Reason.RETRIED
    assert ledger.tokens == {Reason.TRAINED: ledger.sampled - size, reason: size}


def test_delivered_answers_to_one_prompt_are_all_trained():
    samples, ledger = build([make_call(name, [1, 2], [3, 4]) for name in "abc"])
    assert len(samples) == 3
    assert ledger.tokens == {Reason.TRAINED: 6}


def test_an_answer_of_unknown_delivery_that_nobody_replaced_is_trained():
    calls = [make_call("a", [1], [2], delivered=Delivered.UNKNOWN), make_call("b", [9], [2])]
    assert build(calls)[1].tokens == {Reason.TRAINED: 2}


def test_shared_turn_is_trained_once_and_is_context_elsewhere():
    calls = [make_call("a", [1, 2], [3]), make_call("b", [1, 2, 3, 4], [5]), make_call("c", [1, 2, 3, 6], [7, 8])]
    samples, ledger = build(calls)
    assert [sample.mask_T.tolist() for sample in samples] == [
        [False, False, True, False, True],
        [False, False, False, False, True, True],
    ]
    assert (ledger.trained, ledger.context) == (4, 1)


def test_call_that_only_a_dead_answer_continued_is_still_trained():
    samples, ledger = build([make_call("a", [1], [2]), make_call("b", [1, 2, 3], [4], delivered=Delivered.NO)])
    assert [sample.ids_T.tolist() for sample in samples] == [[1, 2]]
    assert ledger.tokens == {Reason.TRAINED: 1, Reason.NOT_DELIVERED: 1}


@pytest.mark.parametrize(
    ("broken", "reason", "num_tokens"),
    [
        ({"logprobs": [-1.0, float("nan")]}, Reason.NO_LOGPROBS, 2),
        ({"logprobs": [float("-inf"), -1.0]}, Reason.NO_LOGPROBS, 2),
        ({"logprobs": []}, Reason.UNEQUAL_LENGTHS, 2),
        ({"logprobs": [-1.0]}, Reason.UNEQUAL_LENGTHS, 2),
        ({"logprobs": [-1.0] * 3}, Reason.UNEQUAL_LENGTHS, 2),
        ({"constrained": True}, Reason.CONSTRAINED, 2),
        ({"response": []}, Reason.EMPTY, 0),
        ({"prompt": [], "response": [], "flaw": "no prompt_token_ids"}, Reason.NO_IDS, 0),
        ({"prompt": []}, Reason.NO_IDS, 2),
    ],
)
def test_a_call_that_cannot_be_trained_is_excluded_with_its_reason_and_nothing_shifts(broken, reason, num_tokens):
    broken = {"prompt": [1], "response": [2, 3], **broken}
    calls = [
        make_call("bad", broken.pop("prompt"), broken.pop("response"), **broken),
        make_call("next", [1, 2, 3, 4], [5, 6]),
        make_call("alone", [8], [9]),
    ]
    samples, ledger = build(calls)
    assert [(s.ids_T[s.positions_M].tolist(), s.logprobs_M.tolist()) for s in samples] == [
        ([5, 6], [-0.5, -0.5]),
        ([9], [-0.5]),
    ]
    assert ledger.calls == {reason: 1, Reason.TRAINED: 2}
    assert ledger.tokens == {Reason.TRAINED: 3} | ({reason: num_tokens} if num_tokens else {})


def test_side_calls_are_left_out_on_demand():
    calls = [make_call("main", [1, 2], [3, 4]), make_call("title", [7], [8], thread="side:title")]
    assert build(calls)[1].tokens == {Reason.TRAINED: 3}
    assert build(calls, side_calls=False)[1].tokens == {Reason.TRAINED: 2, Reason.SIDE_CALL: 1}


def test_an_answer_that_was_cut_short_is_trained_or_masked_as_the_run_says():
    calls = [
        dataclasses.replace(make_call("a", [1], [2, 3]), finish_reason=FinishReason.LENGTH),
        make_call("b", [1, 2, 3, 4], [5]),
    ]
    assert build(calls)[1].tokens == {Reason.TRAINED: 3}
    [sample], ledger = build(calls, cut_short=False)
    assert sample.ids_T[sample.positions_M].tolist() == [5]
    assert ledger.tokens == {Reason.TRAINED: 1, Reason.CUT_SHORT: 2}
    assert ledger.of(Fate.TRUNCATED) == 2


def test_a_sample_over_the_limit_is_kept_up_to_it_and_the_rest_is_counted():
    calls = [
        make_call("a", [1], [2, 3]),
        make_call("b", [1, 2, 3, 4], [5, 6, 7], logprobs=[-1, -2, -3]),
        make_call("c", [1, 2, 3, 4, 5, 6, 7, 8], [9]),
    ]
    [sample], ledger = build(calls, max_tokens=6)
    assert sample.ids_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.positions_M.tolist() == [1, 2, 4, 5]
    assert sample.logprobs_M.tolist() == [-0.5, -0.5, -1, -2]
    assert ledger.tokens == {Reason.TRAINED: 4, Reason.OVER_LIMIT: 2}
    assert build(calls, max_tokens=1) == ([], build(calls, max_tokens=1)[1])


def test_versions_follow_the_tokens_into_the_sample():
    calls = [make_call("a", [1], [2], version=1), make_call("b", [1, 2, 3], [4], version=2)]
    [sample], _ = build(calls)
    assert sample.versions_M.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("spans", "limit", "versions"),
    [
        ([(0, 1), (2, 3)], None, [1, 1, 3, 3]),
        ([(0, 1), (1, 2), (3, 4)], None, [1, 2, 2, 4]),
        ([(0, 1), (2, 3)], 4, [1, 1, 3]),
        ([(0, 1), (2, 3)], 2, [1]),
        ([(1, 5)], None, [-1, 5, 5, 5]),
        ([], None, [-1] * 4),
    ],
)
def test_every_token_has_the_version_that_sampled_it(spans, limit, versions):
    call = make_call("a", [7], [2, 3, 4, 5])
    spans = [VersionSpan(first_token=first, version=version) for first, version in spans]
    [sample], _ = build([dataclasses.replace(call, spans=spans)], max_tokens=limit)
    assert sample.versions_M.tolist() == versions


def test_calls_of_one_conversation_at_two_temperatures_stop_the_step():
    calls = [make_call("a", [1], [2]), dataclasses.replace(make_call("b", [1, 2, 3], [4]), temperature=0.5)]
    with pytest.raises(TrainerError, match=r"0\.5, 1\.0"):
        build(calls)


def test_a_ledger_that_does_not_add_up_stops_the_step():
    with pytest.raises(TrainerError, match="add up"):
        Ledger(sampled=3, tokens={Reason.TRAINED: 1, Reason.RETRIED: 1}, calls={}, context=0)


def test_ledgers_of_rollouts_add_up_to_that_of_the_step():
    _, one = build([make_call("a", [1, 2], [3]), make_call("b", [1, 2], [4], delivered=Delivered.NO)])
    total = sum_ledgers([one, one.left_out(Reason.NO_VERDICT)])
    assert total.sampled == 4
    assert total.tokens == {Reason.TRAINED: 1, Reason.NOT_DELIVERED: 2, Reason.NO_VERDICT: 1}


MOVES = st.tuples(
    st.integers(0, 8),
    st.lists(st.integers(0, 2), max_size=3),
    st.integers(0, 3),
    st.sampled_from(Delivered),
    st.booleans(),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)


@given(st.lists(MOVES, max_size=12), st.none() | st.integers(1, 12), st.booleans())
def test_on_random_forests_every_sampled_token_is_accounted_for_and_trained_at_most_once(moves, limit, cut_short):
    calls = []
    for number, (base, extra, size, delivered, constrained, finish) in enumerate(moves):
        start = _full(calls[base]) if base < len(calls) else [7]
        call = make_call(str(number), [*start, *extra], [8] * size, delivered=delivered, constrained=constrained)
        calls.append(dataclasses.replace(call, logprobs_R=np.arange(size), finish_reason=finish))
    samples, ledger = build(calls, max_tokens=limit, cut_short=cut_short)
    assert sum(ledger.tokens.values()) == sum(len(call.response_ids_R) for call in calls)
    by_id = {call.id: call for call in calls}
    trained = [(span.call_id, n) for s in samples for span in s.spans for n in range(span.stop - span.start)]
    assert len(trained) == len(set(trained)) == ledger.trained
    assert ledger.context == sum(s.num_tokens for s in samples) - ledger.trained - _num_prompt(samples, by_id)
    for sample in samples:
        assert sample.num_tokens <= (limit or sample.num_tokens)
        last = _full(by_id[sample.call_ids[-1]])
        assert sample.ids_T.tolist() == last[: sample.num_tokens]
        logprobs = iter(sample.logprobs_M.tolist())
        for span in sample.spans:
            call = by_id[span.call_id]
            assert not call.constrained
            size = span.stop - span.start
            assert sample.ids_T[span.start : span.stop].tolist() == call.response_ids_R[:size].tolist()
            assert [next(logprobs) for _ in range(size)] == call.logprobs_R[:size].tolist()


def _num_prompt(samples, by_id):
    """Tokens of samples that no call of their path sampled."""
    total = 0
    for sample in samples:
        sampled = set()
        for call_id in sample.call_ids:
            start = len(by_id[call_id].prompt_ids_P)
            sampled |= set(range(start, start + len(by_id[call_id].response_ids_R)))
        total += len(set(range(sample.num_tokens)) - sampled)
    return total


def _full(call):
    return [*call.prompt_ids_P.tolist(), *call.response_ids_R.tolist()]
