"""How many attempts a controller runs at once: the rule, and what it does to an engine."""

import pytest

from manege.config import ControllerConfig
from manege.controller.concurrency import Concurrency

CALM = {"running": 8, "waiting": 0, "cache_usage": 0.5}
BUSY = {"running": 8, "waiting": 3, "cache_usage": 0.5}


def look(limit, seen, *, num_attempts=None, paused=False):
    limit.observe(**seen, num_attempts=limit.limit if num_attempts is None else num_attempts, paused=paused)
    return limit.limit


def lowered(to, *, upper=16, lower=2):
    """A controller that was overloaded while it had that many attempts."""
    limit = Concurrency(lower=lower, upper=upper)
    for _ in range(2):
        look(limit, BUSY, num_attempts=to)
    return limit


def test_it_begins_at_its_upper_bound():
    assert Concurrency(lower=2, upper=16).limit == 16


@pytest.mark.parametrize(
    ("seen", "limits"),
    [
        (BUSY, [16, 12, 12, 9, 9, 7]),
        ({**CALM, "cache_usage": 0.95}, [16, 12, 12, 9, 9, 7]),
        ({"running": 0, "waiting": 1, "cache_usage": 0.0}, [16, 12]),
        ({**CALM, "waiting": 2}, [16, 16, 16]),
        ({**CALM, "cache_usage": 0.9}, [16, 16, 16]),
        (CALM, [16, 16, 16]),
    ],
    ids=["queue", "cache", "only waits", "a short queue", "a well-used cache", "calm"],
)
def test_overload_of_two_looks_lowers_it_by_a_factor(seen, limits):
    limit = Concurrency(lower=2, upper=16)
    assert [look(limit, seen) for _ in limits] == limits


def test_a_burst_of_one_look_changes_nothing():
    limit = Concurrency(lower=2, upper=16)
    assert [look(limit, seen) for seen in [BUSY, CALM] * 4] == [16] * 8


def test_what_is_lowered_is_what_runs_and_not_a_limit_that_nobody_uses():
    assert lowered(10, upper=16).limit == 8


def test_it_is_not_lowered_again_before_the_attempts_have_come_down():
    limit = lowered(16)
    assert [look(limit, BUSY, num_attempts=n) for n in (16, 15, 14, 13, 12)] == [12, 12, 12, 12, 9]


@pytest.mark.parametrize(("upper", "limits"), [(16, [13, 14, 15, 16, 16]), (1280, [1034, 1044, 1054, 1064, 1074])])
def test_it_rises_by_a_constant_while_it_is_used_up(upper, limits):
    limit = lowered(upper, upper=upper)
    assert [look(limit, CALM) for _ in limits] == limits


def test_it_does_not_rise_while_nobody_uses_it_up():
    limit = lowered(16)
    assert [look(limit, CALM, num_attempts=11) for _ in range(3)] == [12] * 3


def test_it_never_leaves_its_bounds():
    limit = Concurrency(lower=3, upper=16)
    assert min(look(limit, BUSY) for _ in range(40)) == 3
    assert max(look(limit, CALM) for _ in range(40)) == 16


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match="min_slots = 4 is more than slots = 2"):
        ControllerConfig(slots=2, min_slots=4)


@pytest.mark.parametrize("seen", [BUSY, CALM], ids=["busy", "calm"])
def test_a_pause_changes_nothing(seen):
    limit = lowered(16)
    assert [look(limit, seen, paused=True) for _ in range(5)] == [12] * 5


class SimulatedEngine:
    """Decodes `capacity` requests at once; an attempt has a request half of its time, and a tenth of them end between
    two looks."""

    def __init__(self, capacity, *controllers):
        self.capacity, self.controllers = capacity, controllers
        self.attempts = [0 for _ in controllers]

    def step(self):
        """One look of every controller."""
        for index, controller in enumerate(self.controllers):
            staying = self.attempts[index] - -(-self.attempts[index] // 10)
            self.attempts[index] = max(staying, controller.limit)
        requests = sum(self.attempts) // 2
        seen = {"running": min(requests, self.capacity), "waiting": max(0, requests - self.capacity), "cache_usage": 0}
        for attempts, controller in zip(self.attempts, self.controllers, strict=True):
            controller.observe(**seen, num_attempts=attempts, paused=False)


@pytest.mark.parametrize("capacity", [4, 16, 100])
def test_it_settles_where_the_engine_is_full_and_its_queue_short(capacity):
    engine = SimulatedEngine(capacity, Concurrency(lower=1, upper=512))
    for _ in range(100):
        engine.step()
    requests = []
    for _ in range(200):
        engine.step()
        requests.append(engine.attempts[0] // 2)
    assert sum(min(number, capacity) for number in requests) / 200 >= 0.95 * capacity
    assert sum(requests) / 200 <= 1.3 * capacity + 2


def test_it_follows_a_capacity_that_changes():
    engine = SimulatedEngine(16, Concurrency(lower=1, upper=64))
    for capacity in (16, 4, 24):
        engine.capacity = capacity
        for _ in range(100):
            engine.step()
        assert 0.75 * capacity <= engine.attempts[0] / 2 <= 1.5 * capacity + 1


def test_two_controllers_come_to_share_an_engine_fairly():
    first, second = Concurrency(lower=1, upper=64), lowered(2, upper=64, lower=1)
    engine = SimulatedEngine(32, first, second)
    for _ in range(600):
        engine.step()
    shares = [0, 0]
    for _ in range(200):
        engine.step()
        shares = [share + attempts for share, attempts in zip(shares, engine.attempts, strict=True)]
    assert 0.8 <= shares[0] / shares[1] <= 1.25
