"""Rollouts as chat examples."""

from manege.cli.sft import chat_examples
from manege.store.exports.base import ExportedRollout
from manege.trainer.algo.fates import ALL_CALLS, SampleRules
from manege.types import Delivered, Outcome, Rollout, RolloutSpec, RolloutState, Task
from tests.calls import make_call

TOOLS = [{"type": "function", "function": {"name": "look"}}]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def spoken(name, prompt, answer, messages, said, **more):
    return make_call(name, prompt, answer, request={"messages": messages}, reply=assistant(said), **more)


FIRST = make_call("a", [1], [2], request={"messages": [user("hi")], "tools": TOOLS}, reply=assistant("A"))
SECOND = spoken("b", [1, 2, 3], [4], [user("on")], "B", parent="a")


def examples(*calls, rules=ALL_CALLS):
    spec = RolloutSpec(id="r", run="run", task=Task(id="t", input={"q": 1}, hidden={"answer": 33}))
    rollout = Rollout(spec=spec, state=RolloutState.SUCCEEDED, attempt=0, outcome=Outcome.OK, created_s=0.0)
    found = chat_examples(ExportedRollout(rollout=rollout, calls=calls, events=[]), rules)
    return [([message["content"] for message in each["messages"]], each.get("tools")) for each in found]


def test_a_conversation_is_one_example_with_its_tools():
    assert examples(FIRST, SECOND) == [(["hi", "A", "on", "B"], TOOLS)]


def test_a_fork_and_another_conversation_are_examples_of_their_own():
    other = spoken("c", [1, 2, 9], [5], [user("else")], "C", parent="a")
    alone = spoken("d", [7], [8], [user("new")], "D")
    assert [said for said, _ in examples(FIRST, SECOND, other, alone)] == [
        ["hi", "A", "on", "B"],
        ["hi", "A", "else", "C"],
        ["new", "D"],
    ]


def test_what_the_agent_may_not_have_got_is_left_out():
    for delivered in (Delivered.NO, Delivered.UNKNOWN):
        lost = spoken("c", [1, 2, 3], [9], [user("on")], "lost", parent="a", delivered=delivered)
        assert examples(FIRST, lost) == [(["hi", "A"], TOOLS)]
        assert examples(FIRST, lost, SECOND) == [(["hi", "A", "on", "B"], TOOLS)]
    maybe = make_call(
        "a", [1], [2], request={"messages": [user("hi")]}, reply=assistant("A"), delivered=Delivered.UNKNOWN
    )
    assert examples(maybe, SECOND) == [(["hi", "A", "on", "B"], None)]


def test_the_runs_rules_and_calls_without_messages_leave_out_more():
    side = spoken("s", [5], [6], [user("title?")], "T", thread="side:title")
    text = make_call("t", [8], [9], request={"prompt": "once"}, reply={"text": " upon"})
    assert len(examples(FIRST, side, text)) == 2
    assert len(examples(FIRST, side, text, rules=SampleRules(side_calls=False))) == 1
