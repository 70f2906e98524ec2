"""What every Store must do; run against each implementation."""

import asyncio
import dataclasses

import numpy as np
import pytest

from manege.errors import ConflictError, NotFoundError, UnprocessableError
from manege.store.base import Ending, RolloutPage
from manege.store.sql import SqlStore
from manege.types import Delivered, Event, Outcome, RolloutSpec, RolloutState, Task
from tests.calls import make_call

pytestmark = pytest.mark.anyio


def spec(name, **changes):
    return RolloutSpec(**{"id": name, "run": "run", "task": Task(id="t", input={"q": "ü"}), "group": "g", **changes})


async def running(store, *names, **changes):
    await store.create_rollouts([spec(name, **changes) for name in names])
    return await store.claim(controller="c", limit=len(names), lease_s=30)


async def finish(store, name, attempt=0, outcome=Outcome.OK, reward=None, message=None, evidence=None, **changes):
    ending = Ending(outcome=outcome, reward=reward, message=message, evidence=evidence or {}, **changes)
    return await store.finish(name, attempt, ending)


def reward_event(name, value, attempt=0):
    return Event(rollout_id=name, attempt=attempt, event_type="reward", data={"value": value}, timestamp_s=1.0)


async def test_a_rollout_comes_back_as_it_was_specified(store):
    asked = spec("a", is_train=False, temperature=0.5, max_attempts=3, metadata={"x": [1, None]}, reward_from="agent")
    (created,) = await store.create_rollouts([asked])
    assert created.spec == asked
    assert await store.get_rollout("a") == created
    assert (created.state, created.attempt, created.created_s) == (RolloutState.QUEUING, 0, 1000.0)


async def test_creating_again_returns_what_exists(store):
    await running(store, "a")
    again = await store.create_rollouts([spec("a", group="other"), spec("b"), spec("b")])
    assert [(rollout.state, rollout.spec.group) for rollout in again] == [
        (RolloutState.RUNNING, "g"),
        (RolloutState.QUEUING, "g"),
        (RolloutState.QUEUING, "g"),
    ]
    assert (await store.count_rollouts())[RolloutState.QUEUING] == 1


async def test_claims_take_the_oldest_and_none_twice(store):
    await store.create_rollouts([spec(f"r{number}") for number in range(20)])
    claims = await asyncio.gather(*[store.claim(controller=f"c{c}", limit=3, lease_s=30) for c in range(8)])
    taken = [rollout.spec.id for claim in claims for rollout in claim]
    assert taken == [f"r{number}" for number in range(20)]
    assert all(rollout.state is RolloutState.RUNNING and rollout.started_s for claim in claims for rollout in claim)


async def test_a_lease_that_ran_out_becomes_a_new_attempt_of_another_controller(store, clock):
    await running(store, "a", "b")
    clock.now_s += 20
    assert await store.renew(controller="c", rollout_ids=["a"], lease_s=30) == []
    clock.now_s += 20
    (taken,) = await store.claim(controller="other", limit=5, lease_s=30)
    assert (taken.spec.id, taken.attempt, taken.state) == ("b", 1, RolloutState.RUNNING)
    assert await store.renew(controller="c", rollout_ids=["a", "b", "gone"], lease_s=30) == ["b", "gone"]
    with pytest.raises(ConflictError, match="current one is 1"):
        await finish(store, "b")


async def test_a_controller_that_comes_back_finds_what_it_held_and_nobody_took(store, clock):
    await running(store, "a", "b", "other")
    await store.renew(controller="c", rollout_ids=["other"], lease_s=1)
    clock.now_s += 20
    await store.claim(controller="second", limit=1, lease_s=30)
    clock.now_s += 20
    assert [(each.spec.id, each.attempt) for each in await store.held(controller="c", lease_s=30)] == [
        ("a", 0),
        ("b", 0),
    ]
    clock.now_s += 20
    assert await store.claim(controller="second", limit=5, lease_s=30, holding=["other"]) == []
    assert await store.held(controller="unknown", lease_s=30) == []


async def test_a_rollout_that_is_given_back_loses_no_attempt(store):
    await running(store, "a", max_attempts=1)
    for attempt in (1, 2):
        assert await store.renew(controller="c", rollout_ids=["a", "gone"], lease_s=0) == ["gone"]
        (taken,) = await store.claim(controller="c", limit=5, lease_s=30)
        assert (taken.spec.id, taken.attempt) == ("a", attempt)
    assert await store.renew(controller="other", rollout_ids=["a"], lease_s=0) == ["a"]
    assert (await finish(store, "a", 2, outcome=Outcome.INFRA_ERROR)).state is RolloutState.FAILED


async def test_a_lost_lease_with_no_attempt_left_ends_the_rollout(store, clock):
    await running(store, "a", max_attempts=1)
    clock.now_s += 31
    assert await store.claim(controller="c", limit=5, lease_s=30) == []
    ended = await store.get_rollout("a")
    assert (ended.state, ended.outcome, ended.reward) == (RolloutState.FAILED, Outcome.INFRA_ERROR, None)
    assert [r.spec.id for r in (await store.terminal(run=None, after=0, limit=9)).rollouts] == ["a"]


@pytest.mark.parametrize(
    ("outcome", "given", "state", "reward"),
    [
        (Outcome.OK, 0.25, RolloutState.SUCCEEDED, 0.25),
        (Outcome.OK, None, RolloutState.SUCCEEDED, None),
        (Outcome.AGENT_ERROR, None, RolloutState.FAILED, 0.0),
        (Outcome.AGENT_TIMEOUT, None, RolloutState.FAILED, 0.0),
        (Outcome.AGENT_TIMEOUT, 1.0, RolloutState.FAILED, 1.0),
        (Outcome.CANCELLED, None, RolloutState.CANCELLED, None),
    ],
)
async def test_an_outcome_decides_state_and_default_reward(store, outcome, given, state, reward):
    await running(store, "a")
    ended = await finish(store, "a", outcome=outcome, reward=given, message="why", evidence={"exit_code": 3})
    assert (ended.state, ended.outcome, ended.reward, ended.message) == (state, outcome, reward, "why")
    assert (ended.evidence, ended.completion, ended.ended_s) == ({"exit_code": 3}, 1, 1000.0)
    with pytest.raises(ConflictError):
        await finish(store, "a")


async def test_a_message_with_a_nul_ends_a_rollout_all_the_same(store):
    await running(store, "a")
    assert (await finish(store, "a", message="crashed: \0x")).message == "crashed: \ufffdx"


async def test_infrastructure_failures_start_new_attempts_until_none_is_left(store):
    await running(store, "a")
    again = await finish(store, "a", outcome=Outcome.INFRA_ERROR, message="node died")
    assert (again.state, again.attempt, again.message) == (RolloutState.QUEUING, 1, "node died")
    await store.claim(controller="c", limit=1, lease_s=30)
    with pytest.raises(ConflictError):
        await finish(store, "a", 0)
    ended = await finish(store, "a", 1, outcome=Outcome.INFRA_ERROR)
    assert (ended.state, ended.reward) == (RolloutState.FAILED, None)


async def test_a_final_failure_starts_no_other_attempt(store):
    await running(store, "a")
    ended = await finish(store, "a", outcome=Outcome.INFRA_ERROR, is_final=True)
    assert (ended.state, ended.attempt, ended.reward) == (RolloutState.FAILED, 0, None)


async def test_a_verdict_is_changed_after_the_end_and_the_one_before_stays_in_the_log(store):
    await running(store, "a", "b")
    for name in ("one", "two"):
        await store.add_call(make_call(name, [1], [2], rollout="a"))
    await finish(store, "b", reward=0.5)
    await finish(store, "a", outcome=Outcome.AGENT_ERROR, message="hung", evidence={"x": 1}, call_rewards={"one": 1.0})
    ending = Ending(outcome=Outcome.OK, reward=0.75, message="three of four", call_rewards={"two": 2.0})
    ended = await store.rescore("a", 0, ending, scorer="s2")
    assert ended == await store.get_rollout("a")
    assert (ended.state, ended.outcome, ended.reward) == (RolloutState.SUCCEEDED, Outcome.OK, 0.75)
    assert (ended.message, ended.evidence, ended.completion) == ("three of four", {"x": 1}, 2)
    (note,) = await store.events("a", event_type="rescored")
    assert note.data == {
        "before": {"outcome": "agent_error", "reward": 0.0, "message": "hung"},
        "after": {"outcome": "ok", "reward": 0.75, "message": "three of four"},
        "scorer": "s2",
    }
    earned = [event.data for event in await store.events("a", event_type="call_reward")]
    assert {each["call"]: each["value"] for each in earned} == {"one": 0.0, "two": 2.0}
    page = await store.terminal(run="run", after=0, limit=9)
    assert [(rollout.spec.id, rollout.reward) for rollout in page.rollouts] == [("b", 0.5), ("a", 0.75)]
    worse = await store.rescore("a", 0, Ending(outcome=Outcome.AGENT_TIMEOUT), scorer="s3")
    assert (worse.state, worse.reward) == (RolloutState.FAILED, 0.0)


async def test_only_what_has_ended_is_scored_again(store):
    await running(store, "a", "b")
    await store.cancel("b")
    again = Ending(outcome=Outcome.OK, reward=1.0)
    for name in ("a", "b"):
        with pytest.raises(ConflictError, match="cannot be scored again"):
            await store.rescore(name, 0, again, scorer="s")
    await finish(store, "a", reward=0.5)
    with pytest.raises(ConflictError):
        await store.rescore("a", 1, again, scorer="s")
    with pytest.raises(UnprocessableError, match="no call 'other'"):
        await store.rescore("a", 0, Ending(outcome=Outcome.OK, call_rewards={"other": 1.0}), scorer="s")
    assert ((await store.get_rollout("a")).reward, await store.events("a")) == (0.5, [])


async def test_a_failed_rollout_rests_before_it_is_claimed_again_and_others_pass_it(store, clock):
    await running(store, "a", max_attempts=3)
    await store.create_rollouts([spec("b")])
    await finish(store, "a", outcome=Outcome.INFRA_ERROR, retry_after_s=8)
    assert [rollout.spec.id for rollout in await store.claim(controller="c", limit=9, lease_s=30)] == ["b"]
    clock.now_s += 7.5
    assert await store.claim(controller="c", limit=9, lease_s=30) == []
    clock.now_s += 0.5
    (again,) = await store.claim(controller="c", limit=9, lease_s=30)
    assert (again.spec.id, again.attempt) == ("a", 1)
    # Given back by a controller that stops, it need not rest.
    assert await store.renew(controller="c", rollout_ids=["a"], lease_s=0) == []
    assert [rollout.attempt for rollout in await store.claim(controller="d", limit=9, lease_s=30)] == [2]


async def test_the_last_posted_reward_of_the_attempt_counts_only_where_agents_judge(store):
    await running(store, "own", "scored")
    await running(store, "posted", reward_from="agent")
    for name in ("scored", "posted"):
        await store.add_event(reward_event(name, 0.1))
        await store.add_event(reward_event(name, 0.7))
        await store.add_event(reward_event(name, 0.9, attempt=4))
    assert (await finish(store, "posted")).reward == 0.7
    assert (await finish(store, "scored")).reward is None
    assert (await finish(store, "own", reward=0.3)).reward == 0.3


async def test_cancel_ends_at_once_and_leaves_terminal_rollouts_alone(store):
    await running(store, "a", "b")
    await finish(store, "b", reward=1.0)
    cancelled = await store.cancel("a")
    assert (cancelled.state, cancelled.outcome, cancelled.reward) == (RolloutState.CANCELLED, Outcome.CANCELLED, None)
    assert (await store.cancel("b")).state is RolloutState.SUCCEEDED
    assert await store.cancel("a") == cancelled
    assert await store.renew(controller="c", rollout_ids=["a"], lease_s=30) == ["a"]


async def test_start_runs_without_a_lease(store, clock):
    await store.create_rollouts([spec("a")])
    assert (await store.start("a", evidence={"k8s_job_name": "j"})).evidence == {"k8s_job_name": "j"}
    clock.now_s += 10**6
    assert await store.claim(controller="c", limit=5, lease_s=30) == []
    with pytest.raises(ConflictError):
        await store.start("a", evidence={})


async def test_a_queued_rollout_cannot_succeed(store):
    await store.create_rollouts([spec("a")])
    with pytest.raises(ConflictError, match="queuing and cannot become succeeded"):
        await finish(store, "a")


async def test_the_terminal_feed_misses_nothing_and_repeats_nothing_under_concurrency(store):
    names = [f"r{number}" for number in range(120)]
    await running(store, *names, run="x")
    await running(store, "other", run="y")
    seen, cursor = [], 0

    async def read():
        nonlocal cursor
        while len(seen) < len(names):
            page = await store.terminal(run="x", after=cursor, limit=7)
            seen.extend(page.rollouts)
            cursor = page.cursor

    async def end(part):
        for name in part:
            await (finish(store, name) if hash(name) % 3 else store.cancel(name))

    await asyncio.gather(read(), finish(store, "other"), *[end(names[start::12]) for start in range(12)])
    assert sorted(rollout.spec.id for rollout in seen) == sorted(names)
    completions = [rollout.completion for rollout in seen]
    assert completions == sorted(set(completions))
    assert (await store.terminal(run=None, after=0, limit=500)).num_ended == len(names) + 1


async def test_deleting_keeps_the_order_of_completion(store):
    await running(store, "a", "b")
    await finish(store, "a")
    await store.add_event(reward_event("a", 1.0))
    await store.delete_rollout("a")
    await finish(store, "b")
    page = await store.terminal(run=None, after=0, limit=9)
    assert [rollout.completion for rollout in page.rollouts] == [2]
    for missing in (store.get_rollout("a"), store.delete_rollout("a"), store.add_event(reward_event("a", 1.0))):
        with pytest.raises(NotFoundError):
            await missing


async def test_calls_come_back_exactly_whatever_their_parents(store):
    await running(store, "r")
    first = make_call("c1", [1, 2, 3], [4, 5], logprobs=[-0.1, -2.5])
    child = make_call("c2", [1, 2, 3, 4, 5, 6], [7], parent="c1")
    grandchild = make_call("c3", [1, 2, 3, 4, 5, 6, 7], [], parent="c2")
    rewritten = make_call("c4", [1, 2, 9, 4, 5, 6], [7], parent="c1")
    shorter = make_call("c5", [1, 2], [8], parent="c2")
    foreign = make_call("c6", [1, 2], [8], parent="unknown")
    asked = [first, child, grandchild, rewritten, shorter, foreign]
    asked[0] = dataclasses.replace(first, request={"messages": [{"role": "user", "content": "ü"}]}, reply={"a": 1})
    for call in asked:
        await store.add_call(call)
    await store.set_delivered("c2", Delivered.NO)
    (found,) = (await store.calls(["r"])).values()
    for call, want in zip(found, asked, strict=True):
        for name in ("prompt_ids_P", "response_ids_R", "logprobs_R"):
            assert np.array_equal(getattr(call, name), getattr(want, name))
            assert getattr(call, name).dtype == getattr(want, name).dtype
        plain = ("id", "parent", "spans", "temperature", "finish_reason", "request", "reply", "overridden", "mode")
        assert [getattr(call, name) for name in plain] == [getattr(want, name) for name in plain]
    assert [call.delivered for call in found] == [Delivered.YES, Delivered.NO, *[Delivered.YES] * 4]


async def test_only_calls_of_the_last_attempt_are_read_and_late_ones_refused(store):
    await running(store, "r", "empty")
    await store.add_call(make_call("c0", [1], [2]))
    await finish(store, "r", outcome=Outcome.INFRA_ERROR)
    with pytest.raises(ConflictError):
        await store.add_call(make_call("late", [1], [2]))
    await store.claim(controller="c", limit=1, lease_s=30)
    again = dataclasses.replace(make_call("c1", [1, 2, 5], [3], parent="c0"), attempt=1)
    await store.add_call(again)
    found = await store.calls(["r", "empty", "missing"])
    assert [call.id for call in found["r"]] == ["c1"]
    assert (found["r"][0].prompt_ids_P.tolist(), found["empty"], found["missing"]) == ([1, 2, 5], [], [])
    await finish(store, "r", 1)
    with pytest.raises(ConflictError):
        await store.add_call(dataclasses.replace(again, id="c2"))
    with pytest.raises(NotFoundError):
        await store.set_delivered("c9", Delivered.NO)


async def test_one_bad_write_does_not_fail_its_neighbours(store):
    await running(store, "r")
    calls = [store.add_call(make_call("same" if number % 2 else f"c{number}", [1], [2])) for number in range(40)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results == [None] * 40
    assert len((await store.calls(["r"]))["r"]) == 21


async def test_events_keep_their_order_and_can_be_chosen_by_type(store):
    await running(store, "r")
    await asyncio.gather(*[store.add_event(reward_event("r", number)) for number in range(30)])
    await store.add_event(Event(rollout_id="r", attempt=0, event_type="note", data={"n": None}, timestamp_s=2.0))
    assert [event.data["value"] for event in await store.events("r", event_type="reward")] == list(range(30))
    assert (await store.events("r"))[-1].data == {"n": None}


async def test_rollouts_are_listed_by_run_and_state(store):
    await running(store, "a", "b", run="x")
    await store.create_rollouts([spec("c", run="x"), spec("d", run="y")])
    await finish(store, "a")
    page = await store.list_rollouts(run="x", limit=2)
    assert [r.spec.id for r in page.rollouts] == ["a", "b"]
    page = await store.list_rollouts(run="x", limit=2, after=page.cursor)
    assert [r.spec.id for r in page.rollouts] == ["c"]
    assert await store.list_rollouts(run="x", limit=2, after=page.cursor) == RolloutPage(
        rollouts=[], cursor=page.cursor
    )
    page = await store.list_rollouts(state=RolloutState.QUEUING)
    assert [r.spec.id for r in page.rollouts] == ["c", "d"]
    assert (await store.count_rollouts(run="x")) == {
        RolloutState.QUEUING: 1,
        RolloutState.RUNNING: 1,
        RolloutState.SUCCEEDED: 1,
        RolloutState.FAILED: 0,
        RolloutState.CANCELLED: 0,
    }


async def test_versions_only_grow_and_runs_and_values_are_kept(store, url):
    assert await store.policy_version() == 0
    assert await asyncio.gather(*[store.publish_version() for _ in range(5)]) == [1, 2, 3, 4, 5]
    await store.put_run("r", {"a": 1})
    assert (await store.put_run("r", {"a": 2})).config == (await store.get_run("r")).config == {"a": 2}
    assert await store.get_value("k") is None
    await store.set_value("k", [1])
    await store.set_value("k", {"x": None})
    assert await store.get_value("k") == {"x": None}
    with pytest.raises(NotFoundError):
        await store.get_run("none")
    await store.close()
    await store.close()
    again = await SqlStore.open(url)
    assert (await again.policy_version(), await again.get_value("k")) == (5, {"x": None})
    await again.close()


async def test_a_continued_call_is_kept_by_its_new_tokens_alone_and_read_whole(store):
    await running(store, "r")
    await store.add_call(make_call("c0", [1, 2], [3]))
    await store.add_continued_call(make_call("c1", [4, 5], [6], parent="c0"), 3)
    await store.add_continued_call(make_call("c2", [7], [8], parent="c1"), 6)
    await store.add_call(make_call("c3", [1, 2, 3, 9], [10], parent="c0"))
    await store.add_call(make_call("c4", [1, 2, 3, 9, 10, 11], [12], parent="c3"))
    read = (await store.calls(["r"]))["r"]
    assert [call.prompt_ids_P.tolist() for call in read] == [
        [1, 2],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 3, 9],
        [1, 2, 3, 9, 10, 11],
    ]


async def test_calls_in_one_commit_are_refused_one_by_one(store):
    await running(store, "open", "ended")
    await finish(store, "ended")
    adding = [
        store.add_call(make_call("c0", [1], [2], rollout="open")),
        store.add_call(make_call("c1", [1], [2], rollout="ended")),
        store.add_call(make_call("c2", [1], [2], rollout="never")),
        store.add_call(make_call("c3", [1], [2], rollout="open")),
        store.set_delivered("c9", Delivered.NO),
    ]
    results = await asyncio.gather(*adding, return_exceptions=True)
    assert [type(result) for result in results] == [
        type(None),
        ConflictError,
        NotFoundError,
        type(None),
        NotFoundError,
    ]
    assert [call.id for call in (await store.calls(["open"]))["open"]] == ["c0", "c3"]


async def test_a_call_that_is_added_again_stays_as_it_is(store):
    await running(store, "r")
    again = make_call("c0", [9], [9])
    await asyncio.gather(*[store.add_call(make_call(name, [1], [2])) for name in ("c0", "c1")], store.add_call(again))
    await store.set_delivered("c1", Delivered.YES)  # Now they are indexed.
    for call in (again, make_call("c2", [1], [2])):
        await store.add_call(call)
    await store.set_delivered("c2", Delivered.YES)
    calls = (await store.calls(["r"]))["r"]
    assert [(call.id, call.prompt_ids_P.tolist()) for call in calls] == [("c0", [1]), ("c1", [1]), ("c2", [1])]


async def test_a_call_after_the_end_of_its_attempt_is_refused_even_in_the_same_commit(store):
    await running(store, "r", "s")
    await store.add_call(make_call("c0", [1], [2]))
    results = await asyncio.gather(
        store.add_call(make_call("c1", [1], [3])),
        finish(store, "r", outcome=Outcome.INFRA_ERROR),
        store.add_call(make_call("c2", [1], [4])),
        store.add_call(make_call("c3", [1], [5], rollout="s")),
        return_exceptions=True,
    )
    assert [isinstance(result, ConflictError) for result in results] == [False, False, True, False]


async def test_a_rollout_is_read_as_it_is_after_every_change(store):
    await running(store, "r", "s")
    for _ in range(2):
        assert (await store.get_rollout("r")).state is RolloutState.RUNNING
    reading = [store.get_rollout("r") for _ in range(3)]
    await asyncio.gather(*reading, store.cancel("r"), *[store.get_rollout("r") for _ in range(3)])
    assert (await store.get_rollout("r")).state is RolloutState.CANCELLED
    await store.get_rollout("s")
    await store.renew(controller="c", rollout_ids=["s"], lease_s=0)
    assert (await store.get_rollout("s")).state is RolloutState.QUEUING
    await store.claim(controller="c", limit=1, lease_s=9)
    assert (await store.get_rollout("s")).attempt == 1
    await store.delete_rollout("s")
    with pytest.raises(NotFoundError):
        await store.get_rollout("s")
