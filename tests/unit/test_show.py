"""What `manege show` and `manege replay` say of calls and rollouts made by hand."""

import io

import numpy as np
import pytest
from rich.console import Console

from manege.cli.diff_view import diff_view, parting
from manege.cli.places import pick
from manege.cli.rebuild import complete_groups
from manege.cli.token_view import call_tokens, pieces, visible
from manege.cli.tree_view import call_rows, tree_table
from manege.errors import ConfigError
from manege.model.folder import open_folder
from manege.trainer.algo.branches import BranchKind
from manege.trainer.algo.fates import SampleRules, reasons
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.types import Delivered, Outcome, Rollout, RolloutSpec, RolloutState, Task
from tests.calls import make_call
from tests.conftest import TINY_MODEL

TOKENIZER = open_folder(str(TINY_MODEL)).tokenizer


def ids(text):
    return TOKENIZER.encode(text).ids


def spoken(name, prompt, answer, *, said=None, **more):
    """A call in text; its reply is what it answered."""
    return make_call(name, ids(prompt), ids(answer), reply={"role": "assistant", "content": said or answer}, **more)


def rows_of(calls, rules=None):
    forest, rules = build_forest(calls), rules or SampleRules()
    return call_rows(forest, build_samples(forest, rules)[0], reasons(forest, rules))


def printed(renderable, width=100):
    """As in a pipe."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    return console.file.getvalue()


SHARED = [spoken("a", "hello", " you"), spoken("b", "hello you, so", " what")]
FORKED = [
    *SHARED,
    spoken("c", "hello you, so what, left", " l", parent="b"),
    spoken("d", "hello you, so what, right", " r"),
    spoken("e", "hello you, so what, left l, on", " m"),
    spoken("f", "other", " o", thread="agent:1"),
]


def test_a_second_continuation_is_set_in_under_its_parent_and_a_new_conversation_begins_at_the_margin():
    rows = rows_of(FORKED)
    assert [(row.guide, row.id) for row in rows] == [
        ("●", "a"),
        ("│", "b"),
        ("├─●", "d"),
        ("│", "c"),
        ("│", "e"),
        ("●", "f"),
    ]
    assert [row.turn for row in rows] == [1, 2, 3, 3, 4, 1]
    assert {row.id: row.branch for row in rows if row.branch} == {"d": BranchKind.FORK, "f": BranchKind.SUB_AGENT}


def test_only_what_no_earlier_call_has_is_new():
    by_id = {row.id: row for row in rows_of(FORKED)}
    assert [(by_id[name].num_prompt, by_id[name].num_new) for name in "abd"] == [(5, 5), (13, 4), (25, 5)]


def test_a_line_is_a_call_however_much_it_said():
    calls = [
        spoken("a" * 24, "hello", " you " + "word\n" * 200, thread="agent:" + "x" * 60),
        spoken("b" * 24, "nothing", "\x1b[31mred\x07", delivered=Delivered.NO),
    ]
    lines = printed(tree_table(rows_of(calls))).splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 100 for line in lines)
    assert "you word word" in lines[1]
    assert lines[1].rstrip().endswith("…")
    assert "stop, lost" in lines[2]
    assert "not_delivered" in lines[2]
    assert "\x1b" not in lines[2]


def test_columns_that_say_the_same_everywhere_are_left_out():
    assert "thread" not in printed(tree_table(rows_of(SHARED)))
    assert "agent:1" in printed(tree_table(rows_of(FORKED)))


def test_a_limit_shows_how_far_an_answer_is_trained():
    [row] = rows_of([spoken("a", "hello", " you all")], SampleRules(max_tokens=8))
    assert (row.num_trained, row.num_sampled) == (3, 8)
    assert "trained 3 of 8" in printed(tree_table([row]))


def test_what_cannot_be_seen_is_shown():
    assert visible("a b\tc\nd") == "a·b⇥c↵\nd"
    assert visible("\x1b[31m\x07\u202e") == r"\x1b[31m\x07\u202e"
    assert visible("größe ▁ 漢字") == "größe·▁·漢字"


def test_pieces_of_one_character_show_their_ids_until_it_is_whole():
    sampled = np.array(ids("a≈b<|end|>"), np.int32)
    shown = pieces(TOKENIZER, sampled, 0)
    assert len(shown) == len(sampled)
    assert shown[0] == "a"
    assert shown[1:3] == [f"⟨{token}⟩" for token in sampled[1:3]]
    assert shown[3:] == ["≈", "b", "<|end|>"]
    assert pieces(TOKENIZER, sampled, 4, 5) == ["b"]
    assert pieces(None, sampled, 4, 5) == [str(sampled[4])]


def test_tokens_are_told_apart_without_colours():
    calls = [spoken("a", "say it", "i t"), spoken("b", "say iti t, again", "x\n", delivered=Delivered.NO)]
    rows = rows_of(calls, SampleRules(max_tokens=8))
    first, second = (printed(call_tokens(row, call, TOKENIZER)) for row, call in zip(rows, calls, strict=True))
    lines = [line.split() for line in first.splitlines()]
    assert ["context", "say·it"] in lines
    assert ["trained", "i┊·┊"] in lines
    assert ["over_limit", "t┊"] in lines
    lines = [line.split() for line in second.splitlines()]
    assert ["as", "before", "9", "tokens"] in lines
    assert ["not_delivered", "x┊↵"] in lines
    assert "\x1b" not in first + second


def asked(name, texts, answer, **more):
    """A chat call: its prompt is its messages, its answer what it says."""
    messages = [{"role": role, "content": text} for role, text in texts]
    prompt = "".join(f"<|{role}|>{text}<|end|>" for role, text in texts) + "<|assistant|>"
    return spoken(name, prompt, f"{answer}<|end|>", said=answer, request={"messages": messages}, **more)


def seen(calls, tokenizer=TOKENIZER):
    found = parting(calls, (calls[0].id, calls[1].id), tokenizer)
    return found, printed(diff_view(found))


def test_the_same_text_in_other_tokens_is_a_retokenisation():
    a = asked("a", [("user", "hi")], "well")
    b = asked("b", [("user", "hi"), ("assistant", "well"), ("user", "so")], "ok")
    end = ids("<|end|>")
    at = b.prompt_ids_P.tolist().index(end[0], len(a.prompt_ids_P))
    split = [*b.prompt_ids_P[:at], *(byte for char in "<|end|>" for byte in ids(char)), *b.prompt_ids_P[at + 1 :]]
    b = make_call("b", split, [1], request=b.request)
    found, text = seen([a, b])
    assert found.looks_like.startswith("retokenisation")
    assert found.at == at
    assert (found.message, found.messages, found.texts) == (None, None, None)
    assert found.tokens[0][at - found.first] == (end[0], "<|end|>")
    assert found.tokens[1][at - found.first] == (ids("<")[0], "<")
    assert f"{at} tokens are the same" in text


def test_another_message_is_shown_around_its_first_difference():
    a = asked("a", [("user", "x" * 100 + " left is right")], "well")
    b = asked("b", [("user", "x" * 100 + " left is wrong"), ("assistant", "well")], "ok")
    found, text = seen([a, b])
    assert found.looks_like.startswith("history rewritten")
    assert found.message == 0
    assert found.messages[0].startswith("…x")
    assert found.messages[0].endswith("left is right")
    assert found.messages[1].endswith("left is wrong")
    assert found.texts[0].endswith("right<|end|><|assistant|>well<|end|>"[:32])
    assert "left·is·wrong" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_same_messages_in_another_text_are_the_templates_doing():
    a = asked("a", [("user", "hi")], "well")
    b = asked("b", [("user", "hi"), ("assistant", "well"), ("user", "so")], "ok")
    b = make_call("b", ids("<|system|>you are<|end|>") + b.prompt_ids_P.tolist(), [1], request=b.request)
    assert seen([a, b])[0].looks_like.startswith("template")
    assert "or retokenisation" in seen([a, b], None)[0].looks_like


def test_a_continuation_does_not_part_and_the_order_of_names_does_not_matter():
    a = asked("a", [("user", "hi")], "well")
    b = make_call("b", [*a.prompt_ids_P, *a.response_ids_R, *ids("more")], [1], parent="a", request={"messages": []})
    assert "the second call continues the first" in seen([a, b])[0].looks_like
    assert parting([a, b], ("b", "a"), TOKENIZER) == parting([a, b], ("a", "b"), TOKENIZER)


def rollout(name, group, completion, *, outcome=Outcome.OK, is_train=True):
    return Rollout(
        spec=RolloutSpec(id=name, run="run", task=Task(id="t", input={}), group=group, is_train=is_train),
        state=RolloutState.RUNNING if completion is None else outcome.state,
        attempt=0,
        outcome=None if completion is None else outcome,
        created_s=0,
        completion=completion,
    )


def test_groups_come_complete_and_in_the_order_of_completion():
    rollouts = [
        rollout("a0", "a", 1),
        rollout("b0", "b", 2),
        rollout("b1", "b", 3),
        rollout("v0", "v", 4, is_train=False),
        rollout("c0", "c", 5, outcome=Outcome.CANCELLED),
        rollout("a1", "a", 6, outcome=Outcome.INFRA_ERROR),
        rollout("d0", "d", 7),
        rollout("d1", "d", None),
    ]
    found = [group and [each.spec.id for each in group] for group in complete_groups(rollouts)]
    assert found == [["b0", "b1"], None, ["a0", "a1"]]


def test_a_name_may_be_its_beginning_and_a_wrong_one_brings_near_ones():
    names = ["ab1-0", "ab1-1", "ab1-10", "cd2-0"]
    assert pick("c", names, "rollout") == "cd2-0"
    assert pick("ab1-1", names, "rollout") == "ab1-1"
    with pytest.raises(ConfigError, match=r"'ab1' is the beginning of more than one rollout: ab1-0, ab1-1, ab1-10"):
        pick("ab1", names, "rollout")
    with pytest.raises(ConfigError, match=r"no rollout that is or begins with 'cd20'; did you mean cd2-0"):
        pick("cd20", names, "rollout")
