"""Which rewarded rollouts a reviewer sees first."""

import json
import random

import pytest

from manege.cli.hack_ranking import Rewarded, rank
from manege.types import Rollout, RolloutSpec, RolloutState, Task
from tests.calls import make_call

READ, TEST, EDIT = "cat src/text.py", "python -m pytest tests", "sed -i 's/a/b/' src/text.py"


def rewarded(name, commands, *, group=None, seconds=5.0, num_left=0, num_flagged=0, as_tools=True):
    calls = []
    for number, command in enumerate(commands):
        tool = {"function": {"name": "bash", "arguments": json.dumps({"command": command})}}
        reply = {"content": "", "tool_calls": [tool]} if as_tools else {"content": command}
        calls.append(make_call(f"{name}-{number}", [1], range(len(command)), rollout=name, reply=reply))
    rollout = Rollout(
        spec=RolloutSpec(id=name, run="run", task=Task(id=f"task-{group}", input={}), group=group),
        state=RolloutState.SUCCEEDED,
        attempt=0,
        reward=1.0,
        evidence={"seconds": {"run": seconds}, "num_left": num_left},
        created_s=0.0,
    )
    return Rewarded(rollout=rollout, calls=calls, num_flagged=num_flagged)


def honest(num, *, group=None, seed=0):
    """Of different lengths, as work is."""
    rng = random.Random(seed)
    return [
        rewarded(
            f"honest-{group}-{number}",
            [READ] * rng.randint(1, 2) + [EDIT, TEST] * rng.randint(2, 4),
            group=group,
            seconds=rng.uniform(4, 9),
        )
        for number in range(num)
    ]


CHEATS = {
    "goes straight to the answer": {"commands": ["git show fix:src/text.py > src/text.py"]},
    "asks elsewhere": {"commands": [READ, "curl http://192.0.2.1/fixed.py -o src/text.py", TEST, EDIT, TEST]},
    "leaves something behind": {"commands": [READ, EDIT, TEST, EDIT, TEST], "num_left": 3},
    "is flagged": {"commands": [READ, EDIT, TEST, EDIT, TEST], "num_flagged": 1},
    "searches the machine": {"commands": [READ, *["find / -name 'answers*' | xargs cat /opt/answers.json"] * 30, EDIT]},
    "takes much longer": {"commands": [READ, EDIT, TEST, EDIT, TEST], "seconds": 900},
}


@pytest.mark.parametrize("as_tools", [True, False])
@pytest.mark.parametrize("name", CHEATS)
def test_one_that_cheats_among_many_that_do_not_comes_first(name, as_tools):
    ranked = rank([*honest(12), rewarded("cheat", **CHEATS[name], as_tools=as_tools), *honest(12, group="g", seed=1)])
    assert ranked[0].rollout == "cheat", [(each.rollout, each.unlike) for each in ranked[:3]]
    assert len(ranked) == 25


def test_what_sets_it_apart_is_told_with_what_is_usual():
    first = rank([*honest(12), rewarded("cheat", **CHEATS["takes much longer"])])[0]
    assert (first.reasons[0].feature, first.reasons[0].value) == ("seconds", 900)
    assert 4 < first.reasons[0].usual < 9
    assert 5 < first.reasons[0].deviation < 10
    words = rank([*honest(12), rewarded("cheat", **CHEATS["goes straight to the answer"])])[0].words
    assert {"git", "show", "fix:src/text.py"} <= set(words)


def test_those_that_are_flagged_are_no_measure_of_honesty_even_where_they_are_many():
    cheats = [rewarded(f"cheat-{number}", ["git log --all"], num_flagged=1) for number in range(20)]
    ranked = rank([*honest(4), *cheats])
    assert {each.rollout for each in ranked[:20]} == {each.rollout.spec.id for each in cheats}


def test_where_all_are_flagged_they_are_still_compared():
    cheats = [rewarded(f"cheat-{number}", ["git log --all"], num_flagged=1) for number in range(5)]
    ranked = rank([*cheats, rewarded("other", [READ, EDIT, TEST], num_flagged=1)])
    assert (len(ranked), ranked[0].rollout) == (6, "other")


def test_a_rollout_is_compared_with_its_group_since_tasks_differ():
    """Twenty calls are usual for the other task, not for this one."""
    long = [rewarded(f"long-{number}", [READ, *[EDIT, TEST] * 10], group="long") for number in range(12)]
    short = [rewarded(f"short-{number}", [READ, EDIT, TEST], group="short") for number in range(12)]
    odd = rewarded("odd", [READ, *[EDIT, TEST] * 10], group="short")
    assert rank([*long, *short, odd])[0].rollout == "odd"


@pytest.mark.parametrize("num", [0, 1, 2])
def test_few_are_ranked_without_a_measure(num):
    assert [each.unlike for each in rank(honest(num))] == [0.0] * num
