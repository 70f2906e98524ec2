"""Why rollouts branch, read from the record alone."""

import pytest

from manege.trainer.algo.branches import BranchKind, branches
from manege.trainer.algo.forest import build_forest
from tests.calls import make_call
from tests.golden_rollouts import golden_calls

GOLDEN = {
    "linear": {},
    "drift at 2 of 8 turns": {3: "retokenisation", 6: "retokenisation"},
    "drift at every turn": dict.fromkeys(range(1, 8), "retokenisation"),
    "reasoning stripped each turn": dict.fromkeys(range(1, 8), "history_rewritten"),
    "one answer rewritten by harness": {4: "history_rewritten"},
    "2 interleaved conversations": {1: "sub_agent"},
    "parent + 3 parallel sub-agents": {3: "sub_agent", 4: "sub_agent", 5: "sub_agent"},
    "compaction once": {5: "compaction"},
    "client retry, 2nd kept": {4: "repeated"},
    "client retry, 1st kept": {4: "repeated"},
    "4 equal prompts, all used": {1: "repeated", 2: "repeated", 3: "repeated"},
    "system nonce each call": dict.fromkeys(range(1, 8), "history_rewritten"),
    "3 shared turns, then 2 different continuations": {5: "fork"},
}


def kinds(calls):
    return {branch.call: branch.kind for branch in branches(build_forest(calls))}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_branches_have_their_kinds(name):
    assert kinds(golden_calls(name)) == GOLDEN[name]


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def asked(*messages):
    return {"messages": list(messages)}


ASK, FIRST = user("ask"), said("first", reasoning_content="because")
TOOL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("reply", "sent_back", "kind"),
    [
        (FIRST, FIRST, BranchKind.TEMPLATE),
        (FIRST, said("first"), BranchKind.REWRITTEN),
        (said("first"), said("first"), BranchKind.RETOKENISATION),
        (said("first"), said(" first\n"), BranchKind.RETOKENISATION),
        (said("first"), said([{"type": "text", "text": "first"}]), BranchKind.RETOKENISATION),
        (said("", tool_calls=[TOOL]), said(None, tool_calls=[{**TOOL, "id": "x"}]), BranchKind.RETOKENISATION),
        (
            said("", tool_calls=[TOOL]),
            said("", tool_calls=[{"function": {"name": "f", "arguments": {"a": 2}}}]),
            BranchKind.REWRITTEN,
        ),
    ],
    ids=["reasoning dropped", "stripped", "plain", "trimmed", "as parts", "tool call", "other arguments"],
)
def test_an_answer_that_comes_back_in_other_tokens_is_told_by_what_was_said(reply, sent_back, kind):
    calls = [
        make_call("a", [1, 2], [3, 4], request=asked(ASK), reply=reply),
        make_call("b", [1, 2, 3, 9, 5], [6], request=asked(ASK, sent_back, user("go on"))),
    ]
    assert kinds(calls) == {1: kind}


@pytest.mark.parametrize(("written", "kind"), [("b a d", BranchKind.RETOKENISATION), ("a b d", BranchKind.TEMPLATE)])
def test_with_a_decoder_the_text_decides_between_template_and_retokenisation(written, kind):
    names = {2: "b", 3: "a d", 7: written}
    calls = [
        make_call("a", [1], [2, 3], request=asked(ASK), reply=said("", tool_calls=[TOOL])),
        make_call("b", [1, 7, 5], [6], request=asked(ASK, said("", tool_calls=[TOOL]), user("go on"))),
    ]
    found = branches(build_forest(calls), lambda ids: " ".join(names.get(each, "?") for each in ids))
    assert [branch.kind for branch in found] == [kind]


def test_the_same_messages_that_part_outside_of_an_answer_are_the_template():
    calls = [
        make_call("a", [1, 2], [3], request=asked(ASK), reply=said("first")),
        make_call("b", [7, 2, 3, 5], [6], request=asked(ASK, said("first"), user("go on"))),
    ]
    assert kinds(calls) == {1: BranchKind.TEMPLATE}


def test_history_is_followed_through_recorded_parents():
    calls = [
        make_call("a", [1], [2], request=asked(ASK), reply=said("first")),
        make_call("b", [1, 2, 3], [4], parent="a", request=asked(user("more")), reply=said("second")),
        make_call("c", [1, 2, 3, 9], [6], request=asked(ASK, said("first"), user("more"), said("second"), user("x"))),
    ]
    assert kinds(calls) == {2: BranchKind.RETOKENISATION}


def test_parallel_calls_and_choices_are_forks_and_repeats():
    calls = [
        make_call("a", [1], [2], request=asked(ASK), reply=said("first")),
        make_call("b", [1, 2, 3], [4], parent="a", request=asked(user("left")), reply=said("l")),
        make_call("c", [1, 2, 3], [5], parent="a", request=asked(user("left")), reply=said("m")),
        make_call("d", [1, 2, 8], [5], parent="a", request=asked(user("right")), reply=said("r")),
    ]
    assert kinds(calls) == {2: BranchKind.REPEATED, 3: BranchKind.FORK}


def test_known_threads_are_named_by_their_first_call_only():
    calls = [
        make_call("main", [1], [2], request=asked(ASK)),
        make_call("title", [7], [8], thread="side:title", request=asked(user("title?"))),
        make_call("agent", [5], [6], thread="agent:1", request=asked(user("look"))),
        make_call("more", [5, 6, 7], [6], thread="agent:1", request=asked(user("look"), said(""), user("x"))),
    ]
    assert kinds(calls) == {1: BranchKind.SIDE_CALL, 2: BranchKind.SUB_AGENT}


def test_dropping_the_middle_of_a_history_is_compaction():
    turns = [message for n in range(4) for message in (said(f"answer {n}"), user(f"result {n}"))]
    calls = [
        make_call("a", [1, 2, 3, 4, 5], [6], request=asked(ASK, *turns), reply=said("answer 4")),
        make_call("b", [1, 2, 9], [6], request=asked(ASK, *turns[-2:])),
    ]
    assert kinds(calls) == {1: BranchKind.COMPACTION}


def test_without_messages_only_tokens_speak():
    calls = [
        make_call("a", [1], [2]),
        make_call("b", [1, 2, 3], [4]),
        make_call("c", [1, 2, 5], [4]),
        make_call("d", [6], [4]),
        make_call("e", [6], [5]),
    ]
    assert kinds(calls) == {2: BranchKind.FORK, 3: BranchKind.UNKNOWN, 4: BranchKind.REPEATED}
