"""Bars of a timeline: lanes, parts of calls, what has no end yet; and the picture of them."""

import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from manege.cli.timeline import Piece, Update, call_pieces, make_timeline, pack
from manege.cli.timeline_picture import draw_timeline
from manege.types import TERMINAL, Outcome, Rollout, RolloutSpec, RolloutState, Task, VersionSpan
from tests.calls import make_call


@pytest.mark.parametrize(
    ("spans", "lanes"),
    [
        ([], []),
        ([(0, 1), (1, 2), (2, 3)], [0, 0, 0]),
        ([(0, 3), (1, 2), (2, 4)], [0, 1, 1]),
        ([(0, 2), (0, 1), (1, 5), (2, 3), (2, 4)], [0, 1, 1, 0, 2]),
        ([(0, 9), (0, 2), (0, 3), (4, 5), (4, 6)], [0, 1, 2, 1, 2]),
        ([(1, 1), (1, 1), (1, 2)], [0, 0, 0]),
    ],
    ids=["none", "one after the other", "lowest free", "as soon as one is free", "from below", "no time"],
)
def test_a_bar_is_in_the_lowest_lane_that_is_free(spans, lanes):
    assert pack(spans) == lanes


def test_there_are_as_many_lanes_as_bars_at_once_and_none_overlap():
    rng = random.Random(1)
    for _ in range(50):
        spans = sorted((start, start + rng.randint(1, 9)) for start in (rng.randint(0, 40) for _ in range(30)))
        lanes = pack(spans)
        by_moment = [[lane for lane, (a, b) in zip(lanes, spans, strict=True) if a <= t < b] for t in range(50)]
        assert all(len(set(at_once)) == len(at_once) for at_once in by_moment)
        assert max(lanes) + 1 == max(map(len, by_moment))


def span(first_token, version, **more):
    return {"first_token": first_token, "version": version, **more}


@pytest.mark.parametrize(
    ("spans", "num_tokens", "pieces"),
    [
        ([span(0, 3)], 4, [(100, 108, 3)]),
        ([span(0, 3), span(1, 4)], 4, [(100, 102, 3), (102, 108, 4)]),
        ([span(0, 3), span(2, 4), span(3, 6)], 4, [(100, 104, 3), (104, 106, 4), (106, 108, 6)]),
        ([span(0, 3), span(2, 3, old_cache=True), span(3, 4)], 4, [(100, 106, 3), (106, 108, 4)]),
        ([], 4, [(100, 108, None)]),
        ([], 0, [(100, 108, None)]),
    ],
    ids=["one", "two", "three", "an old cache is no other version", "not known", "no tokens"],
)
def test_a_call_is_split_by_its_versions_in_proportion_to_their_tokens(spans, num_tokens, pieces):
    found = call_pieces(timed(spans, num_tokens))
    assert [(piece.start_s, piece.end_s, piece.version) for piece in found] == pieces


def timed(spans, num_tokens):
    """From 100 s to 108 s."""
    spans = [VersionSpan(**each) for each in spans]
    return replace(make_call("c", [1], range(num_tokens)), spans=spans, created_s=100.0, ended_s=108.0)


def rollout(name, started_s, ended_s=None, *, state=RolloutState.SUCCEEDED, is_train=True):
    return Rollout(
        spec=RolloutSpec(id=name, run="run", task=Task(id="t", input={}), is_train=is_train),
        state=state,
        attempt=0,
        outcome=Outcome.OK if ended_s else None,
        created_s=0.0,
        started_s=started_s,
        ended_s=ended_s,
    )


def piece(start_s, end_s, version=0):
    return Piece(start_s=start_s, end_s=end_s, version=version)


def step(version, time_s, update_s=2.0):
    return {"kind": "step", "policy_version": version, "time_s": time_s, "update_s": update_s}


def test_bars_come_by_start_and_what_has_not_started_has_none():
    rollouts = [
        rollout("late", 12.0, 20.0),
        rollout("early", 10.0, 15.0),
        rollout("waits", None, state=RolloutState.QUEUING),
        rollout("lost and waits again", 11.0, state=RolloutState.QUEUING),
        rollout("never began", None, 14.0, state=RolloutState.CANCELLED),
    ]
    timeline = make_timeline(rollouts, {}, [])
    assert [(bar.rollout, bar.lane, bar.start_s, bar.end_s) for bar in timeline.bars] == [
        ("early", 0, 10.0, 15.0),
        ("late", 1, 12.0, 20.0),
    ]
    assert (timeline.start_s, timeline.end_s, timeline.num_lanes) == (10.0, 20.0, 2)
    assert make_timeline(rollouts[2:], {}, [step(1, 20.0)]) is None


@pytest.mark.parametrize(
    ("pieces", "rows", "end_s"),
    [([], [], 20.0), ([piece(11, 23)], [], 23.0), ([piece(11, 23)], [step(1, 30.0)], 30.0)],
    ids=["another rollout", "its own call", "an update"],
)
def test_what_has_not_ended_lasts_until_the_last_thing_that_is_known(pieces, rows, end_s):
    rollouts = [rollout("open", 10.0, state=RolloutState.RUNNING), rollout("ended", 10.0, 20.0)]
    timeline = make_timeline(rollouts, {"open": pieces}, rows)
    assert [bar.end_s for bar in timeline.bars] == [end_s, 20.0]
    assert timeline.end_s == end_s


def test_calls_are_cut_where_their_rollout_ends():
    pieces = [piece(8, 9), piece(9, 11), piece(12, 13), piece(19, 25), piece(21, 22)]
    [bar] = make_timeline([rollout("r", 10.0, 20.0)], {"r": pieces}, []).bars
    assert bar.pieces == [piece(10, 11), piece(12, 13), piece(19, 20)]


def test_updates_of_rollouts_that_are_gone_are_left_out():
    rows = [step(1, 5.0), step(2, 11.0), {"kind": "evaluation", "step": 2}, step(3, 22.0)]
    timeline = make_timeline([rollout("r", 10.0, 20.0)], {}, rows)
    assert timeline.updates == [Update(version=2, start_s=9.0, end_s=11.0), Update(version=3, start_s=20.0, end_s=22.0)]
    assert (timeline.start_s, timeline.end_s) == (9.0, 22.0)


def boxes(svg):
    """By name, how many there are in it."""
    groups = ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}g")
    return {group.get("id"): "".join(path.get("d") or "" for path in group).count("M") for group in groups}


def test_thousands_of_rollouts_are_drawn_whole_in_a_small_file(tmp_path):
    rollouts = [rollout(f"r{n}", n / 10, n / 10 + 20, is_train=n % 9 > 0) for n in range(5000)]
    pieces = {
        f"r{n}": [piece(n / 10 + 4 * m, n / 10 + 4 * m + 1, n // 1000 + (m > 3)) for m in range(5)] for n in range(5000)
    }
    target = tmp_path / "timeline.svg"
    draw_timeline(make_timeline(rollouts, pieces, [step(n, 100.0 * n) for n in range(1, 6)]), target, title="run")
    found = boxes(target)
    assert (found["rollouts"], found["updates"]) == (5000, 5)
    assert [found[f"version-{version}"] for version in range(6)] == [4000, 5000, 5000, 5000, 5000, 1000]
    assert target.stat().st_size < 5_000_000


def test_ends_other_than_success_are_marked_and_unknown_versions_have_a_look_of_their_own(tmp_path):
    rollouts = [rollout(state.value, 1.0, 2.0, state=state) for state in RolloutState if state in TERMINAL]
    pieces = {"succeeded": [piece(1, 1.5, None)], "failed": [piece(1, 1.5, 7)]}
    draw_timeline(make_timeline(rollouts, pieces, []), tmp_path / "timeline.svg", title="run")
    found = boxes(tmp_path / "timeline.svg")
    assert [found[name] for name in ("failed", "cancelled", "unknown", "version-7")] == [1, 1, 1, 1]
    assert "updates" not in found


@pytest.mark.parametrize("name", ["$x_{1$", '<b>&amp;"--><script>', "\x00\x1b[31m\n", "名前 🐴", "\\frac"])
@pytest.mark.parametrize("ending", ["svg", "png"])
def test_any_name_can_be_drawn(tmp_path, name, ending):
    target = tmp_path / f"timeline.{ending}"
    draw_timeline(make_timeline([rollout(name, 10.0, 10.0)], {}, []), target, title=name)
    if ending == "svg":
        assert boxes(target)["rollouts"] == 1
    else:
        assert target.read_bytes().startswith(b"\x89PNG")
