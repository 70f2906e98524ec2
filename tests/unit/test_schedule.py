"""Which groups a step trains on, how old they may be, and that something can always be trained."""

import random

import pytest

from manege.config import TrainConfig
from manege.trainer.schedule import Drawn, Schedule

ALL_LEFT = 10**6


def schedule(groups=2, **settings):
    return Schedule(TrainConfig(groups=groups, **settings))


def async_schedule(groups=2, **settings):
    return schedule(groups, schedule="async", **settings)


class Tasks:
    """Groups that end in some order; a group teaches something if its task does."""

    def __init__(self, made, worth, order=None):
        self.made, self.worth, self.order = made, worth, order
        self.open, self.num_started = [], 0

    def next_step(self):
        while (drawn := self.made.draw(0)) is None:
            for _ in range(self.made.wanted(ALL_LEFT, begins=0, trains=0)):
                self.made.ask(self.num_started)
                self.open.append(self.num_started)
                self.num_started += 1
            index = self.open.pop(self.order.randrange(len(self.open)) if self.order else 0)
            self.made.end(index, 0, teaches=self.worth[index % len(self.worth)])
        return drawn


# ---- sync: a step's groups do not depend on what ends first


def test_a_step_takes_all_groups_when_all_have_ended():
    made = schedule(3)
    assert made.wanted(ALL_LEFT, begins=0, trains=0) == 3
    for index in range(3):
        made.ask(index)
    assert made.wanted(ALL_LEFT, begins=0, trains=0) == 0
    for index in (2, 0):
        made.end(index, 0)
        assert made.draw(0) is None
    made.end(1, 0)
    assert made.draw(0) == Drawn(groups=[0, 1, 2], replaced=[])
    assert made.wanted(ALL_LEFT, begins=0, trains=0) == 3


def test_no_more_groups_are_asked_for_than_the_run_still_trains():
    assert async_schedule(4, async_groups=8).wanted(5, begins=0, trains=0) == 5


def test_groups_that_begin_before_a_version_are_no_more_than_the_steps_after_it_can_train():
    """Two per step, three under way; while the step that publishes version 8 is made, groups begin under version 7."""
    made = async_schedule(2, async_groups=6, max_staleness=2)
    for index in range(3):
        made.ask(index)
    assert made.wanted(ALL_LEFT, begins=7, trains=7) == 3
    assert made.wanted(ALL_LEFT, begins=7, trains=8) == 1, "they train at versions 8 and 9"


def test_a_constant_group_is_replaced_by_the_next_task_until_the_step_is_full():
    tasks = Tasks(schedule(3), [True, False, False, True, True, False])
    assert tasks.next_step() == Drawn(groups=[0, 3, 4], replaced=[1, 2])
    assert (tasks.num_started, tasks.open) == (5, [])
    assert tasks.next_step() == Drawn(groups=[6, 9, 10], replaced=[5, 7, 8])


def test_replacing_ends_after_two_per_group_and_the_step_takes_what_there_is():
    tasks = Tasks(schedule(2), [False])
    assert tasks.next_step() == Drawn(groups=[4, 5], replaced=[0, 1, 2, 3])
    assert (tasks.num_started, tasks.open) == (6, [])


@pytest.mark.parametrize("worth", [[True], [True, False, False, True, True, False], [False], [False] * 5 + [True]])
def test_what_a_step_trains_does_not_depend_on_the_order_of_completion(worth):
    steps = []
    for seed in range(30):
        tasks = Tasks(schedule(3), worth, random.Random(seed) if seed else None)
        steps.append([tasks.next_step() for _ in range(3)])
        assert not tasks.open
    assert all(each == steps[0] for each in steps)
    used = [index for drawn in steps[0] for index in (*drawn.groups, *drawn.replaced)]
    assert sorted(used) == list(range(tasks.num_started))


# ---- async


def test_a_step_begins_as_soon_as_enough_groups_have_ended_and_others_go_on():
    made = async_schedule(2, async_groups=5)
    for index in range(5):
        made.ask(index)
    made.end(3, 0)
    assert made.draw(0) is None
    made.end(1, 0)
    assert made.draw(0) == Drawn(groups=[1, 3], replaced=[])
    assert sorted(made.under_way) == [0, 2, 4]
    assert made.wanted(ALL_LEFT, begins=0, trains=0) == 2


def test_of_those_that_have_ended_the_oldest_go_first():
    made = async_schedule(2, async_groups=6)
    for index, oldest in enumerate([7, 5, 6, 5, 8]):
        made.ask(index)
        made.end(index, oldest)
    assert made.draw(8) == Drawn(groups=[1, 3], replaced=[])
    assert made.draw(9) == Drawn(groups=[0, 2], replaced=[])


def test_a_group_without_a_token_never_grows_old():
    made = async_schedule(2, async_groups=6, max_staleness=2)
    for index, oldest in enumerate([None, 1, 1]):
        made.ask(index)
        made.end(index, oldest)
    assert made.draw(3) == Drawn(groups=[1, 2], replaced=[])
    assert made.too_old(30) == []


def begun(**settings):
    """At version 6, group 0 is unfinished and began under version 5; the limit is 1, and three others ended."""
    made = async_schedule(2, async_groups=4, max_staleness=1, **settings)
    made.ask(0)
    made.began([0], 5)
    for index in range(1, 4):
        made.ask(index)
        made.end(index, 6)
    return made


def test_a_step_waits_for_a_group_that_it_would_make_too_old():
    made = begun()
    assert made.draw(6) is None
    assert made.late(6, lambda _: 3) is None
    made.end(0, 5)
    assert made.draw(6) == Drawn(groups=[0, 1], replaced=[])


def test_what_may_be_one_version_older_is_not_waited_for():
    made = begun()
    assert made.draw(5) == Drawn(groups=[1, 2], replaced=[])


def test_what_has_not_begun_is_as_young_as_the_present_version():
    made = async_schedule(2, async_groups=4, max_staleness=1)
    for index in range(4):
        made.ask(index)
    made.end(1, 5)
    made.end(2, 5)
    assert made.draw(5) is not None
    made.began([3], 5)
    made.ask(4)
    made.end(4, 6)
    made.ask(5)
    made.end(5, 6)
    assert made.under_way == {0: None, 3: 5, 4: 6, 5: 6}
    assert made.draw(6) is None, "group 3 has tokens of version 5"
    made.end(3, 5)
    assert made.draw(6) == Drawn(groups=[3, 4], replaced=[])


def test_with_drop_the_group_that_a_step_would_make_too_old_is_cut_off():
    made = begun(staleness_policy="drop", max_dropped_fraction=1)
    assert made.late(5, lambda _: 3) is None
    assert made.late(6, lambda _: 3) == 0
    made.end(0, 5)
    assert made.draw(6) == Drawn(groups=[0, 1], replaced=[])


def test_with_drop_nothing_is_cut_off_before_a_step_could_be_drawn():
    made = async_schedule(2, async_groups=4, max_staleness=1, staleness_policy="drop")
    made.ask(0)
    made.began([0], 5)
    made.ask(1)
    made.end(1, 6)
    assert made.late(6, lambda _: 3) is None


def test_dropping_becomes_waiting_where_too_much_would_be_dropped():
    made = begun(staleness_policy="drop", max_dropped_fraction=0.1, group_size=8)
    assert made.late(6, lambda _: 4) is None, "4 of 32 rollouts"
    assert made.late(6, lambda _: 3) == 0
    assert made.late(6, lambda _: 1) is None, "those before count"


def test_a_dropped_group_makes_room_for_another():
    made = begun()
    assert made.wanted(ALL_LEFT, begins=0, trains=0) == 0
    made.drop(0)
    assert made.wanted(ALL_LEFT, begins=0, trains=0) == 1
    assert made.draw(6) == Drawn(groups=[1, 2], replaced=[])


def test_groups_that_versions_without_a_step_made_too_old_are_named():
    """As after a resume."""
    made = async_schedule(2, async_groups=6, max_staleness=2)
    for index, oldest in enumerate([3, 5, 6]):
        made.ask(index, oldest)
        made.end(index, oldest)
    assert made.too_old(5) == []
    assert made.too_old(6) == [0]


def test_groups_that_cannot_be_trained_in_time_do_not_hold_up_those_that_can():
    """Four ended groups at the limit, two per step: waiting would not help."""
    made = async_schedule(2, async_groups=6, max_staleness=2)
    for index in range(4):
        made.ask(index, 3)
        made.end(index, 3)
    assert made.draw(5) == Drawn(groups=[0, 1], replaced=[])
    assert made.too_old(6) == [2, 3]


class World:
    """Groups of random length on a schedule, at random speed; keeps what is really true of them."""

    def __init__(self, rng, made, config):
        self.rng, self.made, self.config = rng, made, config
        self.version, self.now, self.next_index = 0, 0.0, 0
        self.begins, self.ends, self.oldest = {}, {}, {}
        self.staleness, self.num_cut = [], 0

    def ask(self, trains):
        for _ in range(self.made.wanted(ALL_LEFT, begins=self.version, trains=trains)):
            begins = self.now + self.rng.choice([0, 0, self.rng.expovariate(1)])
            self.begins[self.next_index] = begins
            self.ends[self.next_index] = begins + self.rng.lognormvariate(0, 1.5)
            self.made.ask(self.next_index)
            self.next_index += 1

    def begun_by(self, now):
        """Their oldest token is of the version of that time."""
        for index, begins in list(self.begins.items()):
            if begins <= now:
                self.oldest[index] = self.version
                del self.begins[index]

    def step(self):
        while True:
            assert not self.made.too_old(self.version)
            if (drawn := self.made.draw(self.version)) is not None:
                break
            self.ask(self.version)
            late = self.made.late(self.version, lambda _: self.config.group_size)
            index = min(self.ends, key=self.ends.__getitem__) if late is None else late
            self.num_cut += late is not None
            ends = self.ends.pop(index)
            self.now = max(self.now, ends) if late is None else self.now
            self.begun_by(self.now)
            self.made.end(index, self.oldest.get(index))
        self.staleness += [self.version - self.oldest[index] for index in drawn.groups if index in self.oldest]
        self.ask(self.version + 1)
        self.now += self.rng.random()
        self.begun_by(self.now)
        self.made.began([index for index in self.made.under_way if index in self.oldest], self.version)
        self.version += 1


@pytest.mark.parametrize("policy", ["wait", "drop"])
@pytest.mark.parametrize("seed", range(40))
def test_no_group_is_ever_too_old_and_no_step_waits_for_ever(policy, seed):
    rng = random.Random(seed)
    groups, most = rng.randint(1, 5), rng.randint(1, 4)
    config = TrainConfig(
        groups=groups,
        schedule="async",
        max_staleness=most,
        async_groups=rng.randint(groups + 1, (most + 1) * groups),
        staleness_policy=policy,
        **({"max_dropped_fraction": rng.choice([0.01, 0.3, 1])} if policy == "drop" else {}),
    )
    world = World(rng, Schedule(config), config)
    for _ in range(60):
        world.step()
    assert max(world.staleness) <= most
    assert world.num_cut <= config.max_dropped_fraction * world.next_index
    assert policy == "drop" or world.num_cut == 0
