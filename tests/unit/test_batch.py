"""From groups to mini-batches of weighted samples: who is in the baseline, who in the loss, and what is said of it."""

import dataclasses
import math
import random

import numpy as np
import pytest

from manege.config import CreditConfig
from manege.errors import TrainerError
from manege.trainer.algo.ledger import Reason
from manege.trainer.batch import build_batch, is_informative
from manege.trainer.collect import Group
from manege.trainer.diagnosis import REMEDIES, check_trained, diagnose
from manege.types import Delivered, FinishReason, GroupId, Outcome, Rollout, RolloutId, RolloutSpec, RunId, Task
from tests.calls import linear_rollout, make_call

TASK = Task(id="t", input={})
CENTRED = CreditConfig()


def group(name, rewards, *, calls=None, outcomes=None, call_rewards=(), flagged=()):
    """One rollout per reward; each makes one call with two tokens unless `calls` says otherwise. `flagged`: those that
    tried to cheat."""
    outcomes = outcomes or [Outcome.OK] * len(rewards)
    rollouts = [
        Rollout(
            spec=RolloutSpec(id=RolloutId(f"{name}{i}"), run=RunId("run"), task=TASK, group=GroupId(name)),
            state=outcome.state,
            attempt=0,
            outcome=outcome,
            reward=reward,
            evidence={"hacks": {"network": i in flagged, "packages": False}},
            created_s=0.0,
        )
        for i, (reward, outcome) in enumerate(zip(rewards, outcomes, strict=True))
    ]
    if calls is None:
        calls = [[one_call(r.spec.id)] for r in rollouts]
    return Group(task=TASK, rollouts=rollouts, calls=calls, call_rewards=call_rewards)


def one_call(rollout, num_tokens=2, **changes):
    return make_call(f"{rollout}.0", [1, 2, 3], [9] * num_tokens, rollout=rollout, **changes)


NO_IDS = make_call("flawed", [], [], flaw="no token ids")


def build(groups, credit=CENTRED, **options):
    return build_batch(groups, credit, **({"success_reward": 1.0, "rng": random.Random(0)} | options))


def advantages(batch):
    return {item.sample.rollout_id: item.advantages_M.tolist() for item in batch.samples}


def test_no_verdict_is_not_zero_and_its_group_is_kept():
    batch = build([group("a", [1, 3, 2.5, None])])
    assert advantages(batch) == {
        "a0": [pytest.approx(1 - 6.5 / 3)] * 2,
        "a1": [pytest.approx(3 - 6.5 / 3)] * 2,
        "a2": [pytest.approx(2.5 - 6.5 / 3)] * 2,
    }
    assert {item.weight for item in batch.samples} == {1 / (3 * 2)}
    assert batch.ledger.tokens == {Reason.TRAINED: 6, Reason.NO_VERDICT: 2}
    assert (batch.metrics["num_rollouts"], batch.metrics["num_verdicts"]) == (4, 3)


@pytest.mark.parametrize(
    ("outcome", "in_baseline"),
    [
        (Outcome.OK, True),
        (Outcome.AGENT_ERROR, True),
        (Outcome.AGENT_TIMEOUT, True),
        (Outcome.INFRA_ERROR, False),
        (Outcome.CANCELLED, False),
    ],
)
@pytest.mark.parametrize("advantage", ["centred", "returns"])
def test_the_outcome_table_says_who_is_in_the_baseline(outcome, in_baseline, advantage):
    outcomes = [Outcome.OK, Outcome.OK, Outcome.OK, outcome]
    batch = build([group("a", [1, 3, 2, 10], outcomes=outcomes)], CreditConfig(advantage=advantage))
    mean = 4 if in_baseline else 2
    expected = {f"a{i}": [reward - mean] * 2 for i, reward in enumerate([1, 3, 2, 10]) if reward != mean}
    if not in_baseline:
        del expected["a3"]
    assert advantages(batch) == expected


@pytest.mark.parametrize("advantage", ["centred", "returns"])
def test_a_rollout_without_calls_counts_in_baseline_and_weights_only(advantage):
    batch = build(
        [group("a", [1, 0], calls=[[one_call("a0")], []])],
        CreditConfig(advantage=advantage),
    )
    assert advantages(batch) == {"a0": [0.5, 0.5]}
    assert batch.samples[0].weight == 1 / (2 * 2)


def test_groups_are_compared_within_themselves():
    batch = build([group("a", [1, 0]), group("b", [10, 0])])
    assert [a[0] for a in advantages(batch).values()] == [0.5, -0.5, 5, -5]


def test_a_rollout_counts_once_however_many_turns_it_has():
    turns = linear_rollout("a1", [([10], [20])] * 10)
    batch = build([group("a", [1, 0], calls=[[one_call("a0")], turns])])
    assert advantages(batch) == {"a0": [0.5] * 2, "a1": [-0.5] * 10}
    mass = [item.weight * item.sample.num_trained for item in batch.samples]
    assert mass == pytest.approx([0.5, 0.5])


def test_at_sample_level_a_rollout_counts_as_often_as_it_fell_apart():
    apart = [make_call(f"c{i}", [1, i], [9], rollout="a0") for i in range(3)]
    credit = CreditConfig(level="sample", weighting="sample_mean")
    batch = build([group("a", [1, 0], calls=[apart, [one_call("a1")]])], credit)
    assert [item.advantages_M.tolist() for item in batch.samples] == [[0.25]] * 3 + [[-0.75] * 2]


def test_returns_give_each_call_what_was_earned_from_it_on():
    calls = linear_rollout("a0", [([10], [20, 21]), ([11], [22])])
    rewards = [{"a01": 2.0}, {}]
    credit = CreditConfig(advantage="returns", discount=0.5)
    batch = build([group("a", [1, 0.25], calls=[calls, []], call_rewards=rewards)], credit)
    assert advantages(batch) == {"a0": [0.25, 0.25, 1.75]}


@pytest.mark.parametrize("rewards", [[1, 1], [0.1 + 0.2, 0.3], [None, 1], [None, None], [5]])
@pytest.mark.parametrize("advantage", ["centred", "grpo", "rloo", "returns"])
def test_a_constant_group_is_counted_and_has_nothing_to_compute(rewards, advantage):
    groups = [group("a", rewards), group("b", [1, 0])]
    credit = CreditConfig(advantage=advantage)
    batch = build(groups, credit)
    assert set(advantages(batch)) == {"b0", "b1"}
    num_verdicts = sum(reward is not None for reward in rewards)
    assert {item.weight for item in batch.samples} == {1 / ((num_verdicts + 2) * 2)}
    assert (batch.metrics["constant_groups"], batch.metrics["informative_groups"]) == (1, 1)
    assert batch.metrics["lone_groups"] == (num_verdicts == 1)
    assert [is_informative(each, credit, None) for each in groups] == [False, True]
    assert build(groups[:1], credit).samples == []


def test_a_group_in_which_only_calls_differ_is_informative_for_returns():
    calls = [linear_rollout("a0", [([10], [20]), ([11], [22])]), [one_call("a1")]]
    only_calls = group("a", [1, 1], calls=calls, call_rewards=[{"a01": 1.0}, {}])
    assert is_informative(only_calls, CreditConfig(advantage="returns"), None)
    assert not is_informative(only_calls, CENTRED, None)


def test_a_group_that_differs_by_its_length_penalty_is_informative():
    long = group("a", [1, 1], calls=[[one_call("a0", 9)], [one_call("a1", 2)]])
    assert is_informative(long, CreditConfig(overlong_tokens=9), None)


def test_with_a_reference_every_sample_is_computed():
    groups = [group("a", [1, 1, None])]
    assert build(groups).samples == []
    assert set(advantages(build(groups, CreditConfig(kl=0.1)))) == {"a0", "a1"}


@pytest.mark.parametrize(("num", "sizes"), [(1, [7]), (2, [4, 3]), (3, [3, 2, 2]), (7, [1] * 7), (9, [1] * 7 + [0, 0])])
def test_mini_batches_hold_whole_rollouts_of_nearly_equal_number_and_drop_nothing(num, sizes):
    groups = [group("a", [1, 0, None, 0.5]), group("b", [0, 1, 2, 3])]
    apart = [[make_call(f"b{r}{i}", [1, i], [9], rollout=f"b{r}") for i in range(2)] for r in range(4)]
    groups[1] = dataclasses.replace(groups[1], calls=apart)
    credit = CreditConfig(kl=0.1)  # so that those with advantage zero are there, too
    batch = build(groups, credit, num_mini_batches=num)
    owners = [list(dict.fromkeys(item.sample.rollout_id for item in part)) for part in batch.mini_batches]
    assert [len(names) for names in owners] == sizes
    assert [name for names in owners for name in names] == ["a0", "a1", "a3", "b0", "b1", "b2", "b3"]
    for part, size in zip(batch.mini_batches, sizes, strict=True):
        assert sum(item.weight * item.sample.num_trained for item in part) == pytest.approx(1.0 if size else 0.0)


def test_advantages_come_before_mini_batches():
    one, three = (build([group("a", [1, 0, 0])], num_mini_batches=num) for num in (1, 3))
    assert advantages(one) == advantages(three)


@pytest.mark.parametrize(
    ("cut_short", "trained", "reward", "reason"),
    [
        ("train", 4, 1.0, None),
        ("mask", 2, 1.0, Reason.CUT_SHORT),
        ("penalise", 4, 0.75, None),
    ],
)
def test_an_answer_cut_short_is_trained_masked_or_penalised(cut_short, trained, reward, reason):
    cut = dataclasses.replace(one_call("a0"), finish_reason=FinishReason.LENGTH)
    penalty = {"length_penalty": 0.25} if cut_short == "penalise" else {}
    batch = build([group("a", [1, 0], calls=[[cut], [one_call("a1")]])], CreditConfig(cut_short=cut_short, **penalty))
    assert batch.ledger.trained == trained
    assert batch.rollouts[0].reward == reward
    assert batch.ledger.tokens.get(reason, 0) == (2 if reason else 0)
    assert batch.metrics["truncated_tokens"] == (2 if reason else 0)
    assert batch.metrics["reward_mean"] == 0.5
    assert batch.metrics["length_penalty_mean"] == (1.0 - reward) / 2


def test_a_rollout_pays_once_for_its_length():
    both = dataclasses.replace(one_call("a0", 50), finish_reason=FinishReason.LENGTH)
    credit = CreditConfig(cut_short="penalise", overlong_tokens=10, overlong_buffer=4, length_penalty=0.5)
    calls = [[both], [one_call("a1", 8)], [one_call("a2", 4), make_call("x", [5], [6] * 4, rollout="a2")], []]
    batch = build([group("a", [1, 1, 1, 1], calls=calls)], credit)
    assert [rollout.reward for rollout in batch.rollouts] == [0.5, 0.75, 0.75, 1.0]


def test_side_calls_are_left_out_where_a_run_says_so():
    calls = [[one_call("a0"), make_call("s", [7], [8], rollout="a0", thread="side:title")], [one_call("a1")]]
    groups = [group("a", [1, 0], calls=calls)]
    assert build(groups).ledger.trained == 5
    assert build(groups, CreditConfig(side_calls="exclude")).ledger.tokens == {Reason.TRAINED: 4, Reason.SIDE_CALL: 1}


def test_a_sample_ends_at_its_limit_and_what_lies_beyond_is_counted():
    batch = build([group("a", [1, 0])], max_sample_tokens=4)
    assert [item.sample.num_tokens for item in batch.samples] == [4, 4]
    assert batch.ledger.tokens == {Reason.TRAINED: 2, Reason.OVER_LIMIT: 2}


def test_the_ledger_adds_up_and_metrics_say_so():
    lost = one_call("a0", delivered=Delivered.NO)
    calls = [[lost, make_call("b", [4], [5, 6, 7], rollout="a0")], [one_call("a1")], [one_call("a2")]]
    batch = build([group("a", [1, 0, None], calls=calls)])
    metrics = batch.metrics
    assert metrics["tokens_by_reason"] == {"trained": 5, "not_delivered": 2, "no_verdict": 2}
    assert metrics["sampled_tokens"] == sum(metrics["tokens_by_reason"].values()) == 9
    assert (metrics["dead_tokens"], metrics["excluded_tokens"]) == (2, 2)
    assert metrics["trained_fraction"] == 5 / 9


def test_fragmentation_is_told_by_rollout():
    def apart(name, num):
        return [make_call(f"{name}.{i}", [1, 2, i + 10], [9], rollout=name) for i in range(num)]

    sizes = [1, 1, 2, 3, 8, 9, 0]
    calls = [apart(f"a{i}", size) for i, size in enumerate(sizes)]
    metrics = build([group("a", [*[1.0] * 6, 0.0], calls=calls)]).metrics
    assert metrics["samples_histogram"] == {"1": 2, "2": 1, "3-4": 1, "5-8": 1, ">8": 1}
    assert (metrics["num_samples"], metrics["samples_per_rollout"], metrics["samples_per_rollout_max"]) == (24, 4.0, 9)
    assert metrics["one_sample_fraction"] == 2 / 6
    assert sum(metrics["branches"].values()) == 24 - 6
    # A rollout of n calls has 4 n tokens, of which 2 + 2 n are distinct.
    assert metrics["call_unique_fraction"] == sum(2 + 2 * size for size in sizes if size) / (4 * 24)


def test_replaced_groups_count_in_reward_and_success_and_are_accounted_for():
    batch = build([group("a", [1, 0])], replaced=[group("b", [1, 1])])
    assert (batch.metrics["reward_mean"], batch.metrics["success_rate"]) == (0.75, 0.75)
    assert (batch.metrics["num_rollouts"], batch.metrics["constant_groups"]) == (2, 0)
    assert {item.weight for item in batch.samples} == {1 / 4}
    assert batch.ledger.tokens == {Reason.TRAINED: 4, Reason.REPLACED: 4}
    check_trained(batch.ledger, 1.0)


def test_shuffled_rewards_are_the_same_rewards_of_other_rollouts():
    groups = [group("a", [4, 3, 2, 1]), group("b", [8, 7, 6, 5])]
    batch = build(groups, CreditConfig(shuffle_rewards=True))
    given = [rollout.reward for rollout in batch.rollouts]
    assert (sorted(given), given != [4, 3, 2, 1, 8, 7, 6, 5]) == ([1, 2, 3, 4, 5, 6, 7, 8], True)


def test_shuffling_gives_no_reward_to_who_has_none():
    credit = CreditConfig(shuffle_rewards=True, flagged="mask")
    batch = build([group("a", [4, None, 2, 1], flagged=[2])], credit)
    assert [rollout.reward is None for rollout in batch.rollouts] == [False, True, True, False]


CHEATED = {
    "keep": ([5 / 3, -4 / 3, -1 / 3], {Reason.TRAINED: 6}),
    "zero": ([-1, 0, 1], {Reason.TRAINED: 6}),
    "mask": ([-0.5, 0.5], {Reason.TRAINED: 4, Reason.FLAGGED: 2}),
}


@pytest.mark.parametrize("flagged", CHEATED)
def test_who_cheated_is_kept_zeroed_or_masked_as_the_run_says(flagged):
    groups = [group("a", [4, 1, 2], flagged=[0])]
    want, tokens = CHEATED[flagged]
    batch = build(groups, CreditConfig(flagged=flagged))
    got = {item.sample.rollout_id: float(item.advantages_M[0]) for item in batch.samples}
    names = ["a1", "a2"] if flagged == "mask" else ["a0", "a1", "a2"]
    assert got == pytest.approx({name: value for name, value in zip(names, want, strict=True) if value})
    assert {reason: count for reason, count in batch.ledger.tokens.items() if count} == tokens
    assert (batch.metrics["flagged"], batch.metrics["flagged_rewarded"]) == (1, 1.0)
    assert (batch.metrics["reward_mean"], batch.metrics["success_rate"]) == (pytest.approx(7 / 3), 1.0)
    assert batch.metrics["length_penalty_mean"] == 0
    assert groups[0].rollouts[0].reward == 4


def test_a_bad_reward_does_not_become_better_by_cheating():
    batch = build([group("a", [-4, 0, 1], flagged=[0])], CreditConfig(flagged="zero"))
    assert batch.rollouts[0].reward == -4
    assert batch.metrics["flagged_rewarded"] == 0


def test_a_group_that_differs_only_in_who_cheated_teaches_that():
    groups = group("a", [1, 1, 1], flagged=[1])
    assert not is_informative(groups, CENTRED, None)
    assert is_informative(groups, CreditConfig(flagged="zero"), None)


@pytest.mark.parametrize(("flagged", "want"), [("keep", [2.5, -2.5]), ("zero", [-0.5, 0.5]), ("mask", [0])])
def test_rewards_of_calls_count_no_more_than_the_rollout_that_made_them(flagged, want):
    credit = CreditConfig(advantage="returns", flagged=flagged)
    batch = build(
        [
            group(
                "a",
                [1, 1],
                call_rewards=[{"a00": 5.0}, {}],
                calls=[[make_call("a00", [1], [9], rollout="a0")], [make_call("a10", [1], [9], rollout="a1")]],
                flagged=[0],
            )
        ],
        credit,
    )
    got = [
        float(advantages_M[0])
        for rollout in batch.rollouts
        if rollout.reward is not None
        for advantages_M in rollout.advantages
    ]
    assert got == pytest.approx(want)


def test_a_step_with_too_few_trained_tokens_stops_with_its_largest_reasons_and_what_to_do():
    calls = [
        [one_call("a0", 2)],
        [one_call("a1", 4, constrained=True)],
        [one_call("a2", 5, delivered=Delivered.NO)],
        [one_call("a3", 3, logprobs=[math.nan] * 3)],
        [one_call("a4", 1, thread="side:title")],
        [one_call("a5", 1)],
    ]
    batch = build([group("a", [1, *[0] * 5], calls=calls)], CreditConfig(side_calls="exclude"))
    check_trained(batch.ledger, 3 / 16)
    with pytest.raises(TrainerError) as stopped:
        check_trained(batch.ledger, 0.5)
    message = str(stopped.value)
    assert "3 of 16 sampled tokens of this step are trained, less than credit.min_trained_fraction = 0.5" in message
    shown = [(5, Reason.NOT_DELIVERED), (4, Reason.CONSTRAINED), (3, Reason.NO_LOGPROBS)]
    places = [message.index(f"{count} {reason} ({REMEDIES[reason]})") for count, reason in shown]
    assert places == sorted(places)
    assert "side_call" not in message


def test_every_reason_has_a_remedy():
    assert set(REMEDIES) == set(Reason) - {Reason.TRAINED, Reason.REPLACED}


@pytest.mark.parametrize(
    ("rewards", "calls", "message"),
    [
        ([1, 0, 1], [[], [], [one_call("a2")]], "2 of 3 rollouts of this step made no model call"),
        ([None, None, 1], None, "2 of 3 rollouts of this step have no reward"),
        ([1, 0, 1], [[NO_IDS], [NO_IDS, NO_IDS], [NO_IDS, one_call("a2")]], "2 of 3 .* have no call with token ids"),
    ],
)
def test_a_step_in_which_most_rollouts_came_to_nothing_stops(rewards, calls, message):
    with pytest.raises(TrainerError, match=message):
        diagnose([group("a", rewards, calls=calls)], 0.5)
    diagnose([group("a", rewards, calls=calls)], 0.7)


def test_order_of_completion_and_of_groups_leaves_credit_alone():
    groups = [group("a", [1, 0, 0.5]), group("b", [3, None, 1]), group("c", [2, 2, 2])]
    turned = [Group(task=TASK, rollouts=each.rollouts[::-1], calls=each.calls[::-1]) for each in reversed(groups)]
    one, other = build(groups), build(turned)
    assert advantages(one) == advantages(other)
    assert {item.sample.rollout_id: item.weight for item in one.samples} == {
        item.sample.rollout_id: item.weight for item in other.samples
    }
    assert one.ledger == other.ledger
    assert np.isfinite([item.weight for item in one.samples]).all()
