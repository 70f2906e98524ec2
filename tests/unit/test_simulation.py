"""The simulated schedule: what can be computed by hand, what is conserved, and what may never happen."""

import random

import pytest

from benchmarks.async_speedup.report import time_to
from benchmarks.async_speedup.waits import ToolTime, place_of
from benchmarks.simulate_async.agents import Agents, Rollout
from benchmarks.simulate_async.clock import Clock, Process
from benchmarks.simulate_async.engine import Call, Engine, Speed
from benchmarks.simulate_async.fit import Served, fit_speed
from benchmarks.simulate_async.model import Hardware, simulate
from benchmarks.simulate_async.validate import with_tools
from benchmarks.simulate_async.workload import Amount, Plan, Turn, synthetic
from manege.train_config import TrainConfig


def constant(*, tool_s=0.0, start_s=1.0, num_turns=2, num_tokens=10, score_s=0.5):
    turns = [Turn(prompt_tokens=100, answer_tokens=num_tokens, tool_s=tool_s)] * num_turns
    return lambda index, member: Plan(start_s=start_s, turns=turns, score_s=score_s)


def random_workload(seed):
    return synthetic(
        seed=seed,
        turns=Amount.parse("exponential:3"),
        first_prompt=Amount.parse("100"),
        observation=Amount.parse("lognormal:20:1"),
        answer=Amount.parse("exponential:20"),
        tool_s=Amount.parse("lognormal:10:1.5"),
        start_s=0.5,
        score_s=0.2,
    )


def random_case(rng, **fixed):
    groups, max_staleness = rng.randint(1, 4), rng.randint(1, 3)
    train = {
        "steps": 12,
        "groups": groups,
        "group_size": rng.randint(2, 5),
        "schedule": "async",
        "max_staleness": max_staleness,
        "async_groups": rng.randint(groups + 1, (max_staleness + 1) * groups),
        "inflight": rng.choice(["drain", "abort_continue", "keep"]),
    }
    train |= fixed
    hardware = Hardware(
        speed=Speed(base_s=0.05, slope_s=0.01, prefill_s=0.001, max_batch=rng.randint(1, 16)),
        num_engines=rng.randint(1, 3),
        slots=rng.randint(2, 40),
        update_s=(rng.uniform(0.1, 10),),
        publish_s=rng.uniform(0, 1),
        is_separate=rng.random() < 0.5,
        shared_tokens=50,
    )
    return TrainConfig(**train), hardware


def finished(speed, calls, *, num_new=1):
    """When calls end on one engine: (start, tokens) each, with so many prompt tokens."""
    clock, ends = Clock(), [0.0] * len(calls)
    engine = Engine(clock, speed)

    def asks(number, start_s, num_tokens):
        yield start_s
        call = Call(clock, prompt_tokens=num_new, cached_tokens=0, num_tokens=num_tokens)
        engine.start(call)
        yield call.done
        ends[number] = clock.now

    processes = [Process(clock, asks(number, *call)) for number, call in enumerate(calls)]
    for process in processes:
        clock.run(process)
    return ends


def stepped(speed, calls, step_s):
    """The same by small steps of time."""
    ends, waiting, left, now = [0.0] * len(calls), sorted(range(len(calls)), key=lambda n: calls[n][0]), {}, 0.0
    while waiting or left:
        while waiting and calls[waiting[0]][0] <= now and len(left) < speed.max_batch:
            left[waiting[0]] = float(calls[waiting[0]][1])
            waiting.pop(0)
        now += step_s
        done = step_s / speed.step_s(len(left))
        for number in list(left):
            left[number] -= done
            if left[number] <= 0:
                del left[number]
                ends[number] = now
    return ends


def test_a_sync_step_takes_what_its_rollouts_and_its_update_take():
    """1 s start, 2 x (10 tokens in steps of 0.1 + 6 x 0.01 s, 2 s of tools), 0.5 s score, 3 s update."""
    config = TrainConfig(steps=3, groups=2, group_size=3)
    hardware = Hardware(speed=Speed(base_s=0.1, slope_s=0.01), slots=6, update_s=(3.0,))
    result = simulate(config, hardware, constant(tool_s=2.0))
    assert [row.collect_s for row in result.rows] == pytest.approx([1 + 2 * (1.6 + 2) + 0.5] * 3)
    assert [row.update_s for row in result.rows] == pytest.approx([3.0] * 3)
    assert result.engine_idle_s == pytest.approx(3 * (8.7 - 3.2))
    assert result.staleness == [0] * 6


def test_half_the_slots_take_twice_the_time():
    config = TrainConfig(steps=2, groups=1, group_size=4)
    hardware = Hardware(speed=Speed(base_s=0.1), slots=2, update_s=(1.0,))
    result = simulate(config, hardware, constant())
    assert [row.collect_s for row in result.rows] == pytest.approx([2 * 3.5] * 2)


def test_prompt_tokens_that_are_not_cached_stall_everybody():
    """Of 100 prompt tokens 60 are shared: the first call reads 100, the others 40, in the second turn all is there."""
    config = TrainConfig(steps=2, groups=1, group_size=3)
    hardware = Hardware(speed=Speed(base_s=0.1, prefill_s=0.01), slots=3, update_s=(1.0,), shared_tokens=60)
    result = simulate(config, hardware, constant())
    # A prompt's last token is always read.
    assert [row.collect_s for row in result.rows] == pytest.approx([1 + 1 + 1.8 + 1 + 3 * 0.01 + 0.5] * 2)


def test_async_in_steady_state_takes_the_update_alone_where_rollouts_are_ready_in_time():
    """Two steps' worth of agents: the calls of one half end while an update drains, their tools while it computes."""
    config = TrainConfig(steps=20, groups=2, group_size=2, schedule="async", async_groups=4)
    hardware = Hardware(speed=Speed(base_s=0.01), slots=8, update_s=(10.0,))
    result = simulate(config, hardware, constant(tool_s=2.0, num_turns=1, num_tokens=1))
    assert [row.collect_s for row in result.rows[1:]] == pytest.approx([0.0] * 19)
    assert result.seconds == pytest.approx(1 + 0.01 + 2 + 0.5 + 20 * 10 + 18 * 0.01)
    assert [row.staleness for row in result.rows] == [[0, 0], *([[1, 1]] * 19)]


def test_async_with_slow_agents_takes_their_time_over_what_is_under_way():
    """A rollout of 100 s, steps of half the groups, updates of next to nothing: a step in 50 s once it has spread."""
    steps, batches = 40, 2
    config = TrainConfig(steps=steps, groups=2, group_size=2, schedule="async", async_groups=2 * batches)
    hardware = Hardware(speed=Speed(base_s=1e-6), slots=8, update_s=(1e-3,))
    workload = lambda index, member: Plan(  # noqa: E731
        start_s=100.0 if index >= 2 else 50.0, turns=[Turn(prompt_tokens=1, answer_tokens=1, tool_s=0)], score_s=0
    )
    result = simulate(config, hardware, workload)
    assert [row.collect_s for row in result.rows] == pytest.approx([50.0] * steps, abs=0.01)


@pytest.mark.parametrize("inflight", ["drain", "abort_continue", "keep"])
def test_an_update_waits_for_calls_in_flight_only_where_it_drains(inflight):
    """Two calls of 10 s; the second begins 8 s later and is not of the step that the first one's end begins."""
    config = TrainConfig(
        steps=2,
        groups=1,
        group_size=2,
        schedule="async",
        async_groups=2,
        inflight=inflight,
        **({"drain_s": 5.0} if inflight == "drain" else {}),
    )
    hardware = Hardware(speed=Speed(base_s=1.0, prefill_s=0.1), slots=4, update_s=(7.0,))
    workload = lambda index, member: Plan(  # noqa: E731
        start_s=8.0 * index, turns=[Turn(prompt_tokens=20, answer_tokens=10, tool_s=0)], score_s=0
    )
    first, second = simulate(config, hardware, workload).rows
    # Prompts stall whoever runs: 4 of them, 2 s each.
    assert first.collect_s == pytest.approx(4 + 10 + 4)
    drained = 4.0 if inflight == "drain" else 0.0
    assert first.update_s == pytest.approx(drained + 7)
    # Cut after 6 tokens: both prompts and both parts are read again.
    again = 2 * (20 + 6) * 0.1 if inflight == "abort_continue" else 0.0
    assert second.collect_s == pytest.approx({"drain": 0.0}.get(inflight, 4.0 + again))


def test_calls_that_begin_during_a_drain_wait_for_the_new_weights():
    """Of the second group one call ends at 18 s, and one begins at 12 s, after the first group's end at 10 s."""
    config = TrainConfig(steps=2, groups=1, group_size=2, schedule="async", async_groups=2)
    starts_s = {(0, 0): 0, (0, 1): 0, (1, 0): 8, (1, 1): 12}
    workload = lambda index, member: Plan(  # noqa: E731
        start_s=starts_s[index, member], turns=[Turn(prompt_tokens=1, answer_tokens=10, tool_s=0)], score_s=0
    )
    result = simulate(config, Hardware(speed=Speed(base_s=1.0), slots=4, update_s=(7.0,)), workload)
    assert [row.update_s for row in result.rows] == pytest.approx([8 + 7, 7])
    assert [row.collect_s for row in result.rows] == pytest.approx([10, 10])


def test_what_is_cut_off_leaves_its_slot_and_its_engine():
    """The second one waits for a slot until 5 s, and has the engine to itself: 10 tokens of 2 s."""
    clock, ended = Clock(), {}
    agents = Agents(
        clock,
        num_engines=1,
        speed=Speed(base_s=1.0, slope_s=1.0),
        slots=1,
        shared_tokens=0,
        seed=0,
        ended=lambda rollout: ended.update({rollout.group: clock.now}),
    )
    rollouts = [
        Rollout(
            group=group,
            plan=Plan(start_s=0, turns=[Turn(prompt_tokens=1, answer_tokens=10, tool_s=0)], score_s=0),
        )
        for group in range(2)
    ]

    def cut():
        for rollout in rollouts:
            agents.ask(rollout)
        yield 5
        agents.cut(rollouts[0])
        yield 100

    clock.run(Process(clock, cut()))
    assert ended == {0: 5, 1: pytest.approx(25)}


def test_a_group_is_as_old_as_its_oldest_member():
    """The second group's first call is of version 0, its other one begins after the update."""
    config = TrainConfig(steps=2, groups=1, group_size=2, schedule="async", async_groups=2)
    starts_s = {(0, 0): 0, (0, 1): 0, (1, 0): 0, (1, 1): 10}
    workload = lambda index, member: Plan(  # noqa: E731
        start_s=starts_s[index, member], turns=[Turn(prompt_tokens=1, answer_tokens=1, tool_s=0)], score_s=index
    )
    result = simulate(config, Hardware(speed=Speed(base_s=1.0), slots=4, update_s=(5.0,)), workload)
    assert [row.staleness for row in result.rows] == [[0], [1]]


def test_separate_engines_serve_on_during_the_step_and_stand_still_to_publish():
    config = TrainConfig(steps=10, groups=1, group_size=2, schedule="async", async_groups=2)
    workload = constant(num_turns=1, start_s=0.0, num_tokens=10, score_s=0)
    seconds = {}
    for is_separate in (False, True):
        hardware = Hardware(speed=Speed(base_s=1.0), slots=2, update_s=(8.0,), publish_s=1.0, is_separate=is_separate)
        seconds[is_separate] = simulate(config, hardware, workload).seconds
    # Collocated: 10 s of sampling and 9 s of an update take turns. Separate: beside 10 s of sampling only the pause.
    assert seconds[False] == pytest.approx(10 * 19)
    assert seconds[True] == pytest.approx(9 * 11 + 10 + 9)


def test_processor_sharing_equals_a_naive_integration_over_time():
    for seed in range(5):
        rng = random.Random(seed)
        speed = Speed(base_s=0.1, slope_s=0.05, max_batch=rng.choice([2, 3, 100]))
        calls = [(rng.uniform(0, 5), rng.randint(1, 20)) for _ in range(8)]
        assert finished(speed, calls) == pytest.approx(stepped(speed, calls, 0.002), abs=0.03)


def test_every_group_is_trained_once_or_dropped():
    rng = random.Random(1)
    num_dropped = 0
    for seed in range(40):
        fixed = {"staleness_policy": rng.choice(["wait", "drop"])}
        if fixed["staleness_policy"] == "drop":
            fixed["max_dropped_fraction"] = 1.0
        config, hardware = random_case(rng, **fixed)
        result = simulate(config, hardware, random_workload(seed), seed=seed)
        trained = [index for row in result.rows for index in row.groups]
        assert len(trained) == len(set(trained)) == config.steps * config.groups
        asked = set(range(config.steps * config.groups + result.dropped_groups))
        assert set(trained) <= asked
        assert len(asked - set(trained)) == result.dropped_groups
        num_dropped += result.dropped_groups
    assert num_dropped


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_no_group_is_trained_older_than_allowed(policy):
    rng, most = random.Random(2), 0
    for seed in range(60):
        config, hardware = random_case(rng, staleness_policy=policy)
        result = simulate(config, hardware, random_workload(seed), seed=seed)
        assert max(result.staleness) <= config.max_staleness
        most = max(most, max(result.staleness))
        if policy == "drop":
            limit = (
                config.max_dropped_fraction * config.group_size * (result.dropped_groups + config.steps * config.groups)
            )
            assert result.dropped_rollouts <= limit
    assert most == 3


def test_equal_seeds_give_equal_trainings():
    config, hardware = random_case(random.Random(3))
    first, again, other = (simulate(config, hardware, random_workload(seed), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.seconds != other.seconds


def test_the_speed_of_an_engine_is_found_from_the_calls_that_it_served():
    rng, speed = random.Random(4), Speed(base_s=0.1, slope_s=0.02, prefill_s=0.003, max_batch=50)
    calls = [(rng.uniform(0, 200), rng.randint(5, 40)) for _ in range(300)]
    ends = finished(speed, calls, num_new=30)
    served = [
        Served(start_s=start_s, end_s=end_s, new_tokens=30, num_tokens=num_tokens)
        for (start_s, num_tokens), end_s in zip(calls, ends, strict=True)
    ]
    found = fit_speed(served, max_batch=50)
    assert found.step_s(10) == pytest.approx(speed.step_s(10), rel=0.05)
    assert found.prefill_s == pytest.approx(speed.prefill_s, rel=0.3)


@pytest.mark.parametrize("num_turns", [1, 2, 5])
def test_tools_take_the_time_of_their_place_whatever_the_agent_does(num_turns):
    tool_time = ToolTime(mean_s=10, sigma=1, seed=7)
    plan = with_tools(constant(start_s=0, num_turns=num_turns, score_s=0), tool_time)(3, 5)
    assert plan.score_s + sum(turn.tool_s for turn in plan.turns) == pytest.approx(tool_time.seconds(3, 5))
    assert ToolTime.parse(str(tool_time)) == tool_time


def test_tool_times_have_the_mean_that_was_asked_for_and_evaluations_have_none():
    times = [ToolTime(mean_s=10, sigma=1, seed=0).seconds(index, 0) for index in range(20000)]
    assert sum(times) / len(times) == pytest.approx(10, rel=0.03)
    assert place_of("0a1b2c3d-000012-5") == (12, 5)
    assert place_of("0a1b2c3d-e000004-1.0-0003-0") is None


def test_the_time_to_a_success_lies_between_two_evaluations():
    curve = [(0.0, 0.1), (10.0, 0.5), (30.0, 0.9), (40.0, 0.8)]
    assert time_to(curve, 0.7) == pytest.approx(20.0)
    assert time_to(curve, 0.05) == 0.0
    assert time_to(curve, 0.95) is None
