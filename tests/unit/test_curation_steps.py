"""What each kind of step says of a row."""

import json
import subprocess
from collections import Counter

import pytest

from manege.curation.config import AtMost, Decontaminate, HasRef, NotEmpty, Probe, Select, Split, load_curation
from manege.curation.contamination import repository
from manege.curation.rows import read_rows, write_rows
from manege.curation.steps import Context, Dropped, decider
from manege.errors import ConfigError


def pass_through(step, rows, tmp_path, **changes):
    """Rows that go on, and reasons by id."""
    context = Context(id="id", seed="0", base=tmp_path, rows=lambda: iter(rows), **changes)
    decide, kept, dropped = decider(step, context), [], {}
    for row in rows:
        decision = decide(row)
        if isinstance(decision, Dropped):
            dropped[row["id"]] = decision.reason
        else:
            kept.append(decision.row)
    return kept, dropped


def ids(rows):
    return [row["id"] for row in rows]


def test_empty_means_nothing_to_read(tmp_path):
    values = ["text", "", " \n\t", None, [], ["x"], 0]
    rows = [{"id": str(number), "problem_statement": value} for number, value in enumerate(values)]
    kept, dropped = pass_through(NotEmpty(kind="not_empty"), [*rows, {"id": "none"}], tmp_path)
    assert ids(kept) == ["0", "5"]
    assert set(dropped.values()) == {"problem_statement is empty"}


def test_tests_are_counted_over_columns_and_lists_may_be_json(tmp_path):
    rows = [
        {"id": "two", "FAIL_TO_PASS": ["a"], "PASS_TO_PASS": ["b"]},
        {"id": "three", "FAIL_TO_PASS": ["a"], "PASS_TO_PASS": ["b", "c"]},
        {"id": "json", "FAIL_TO_PASS": '["a", "b"]', "PASS_TO_PASS": '["c"]'},
        {"id": "text", "FAIL_TO_PASS": "", "PASS_TO_PASS": "[]"},
    ]
    kept, dropped = pass_through(AtMost(kind="at_most", max=2), rows, tmp_path)
    assert ids(kept) == ["two", "text"]
    assert dropped == {"three": "more than 2 tests", "json": "more than 2 tests"}
    with pytest.raises(ConfigError, match="column 'PASS_TO_PASS' of a row is no list: 'b'"):
        pass_through(AtMost(kind="at_most"), [{"id": "x", "FAIL_TO_PASS": [], "PASS_TO_PASS": "b"}], tmp_path)


def test_branches_are_known_from_a_list_in_any_form(tmp_path):
    (tmp_path / "refs.txt").write_text("a\nrefs/heads/b\n0123abc\trefs/heads/c/d\n0123abc\trefs/tags/e\n\n")
    rows = [{"id": name} for name in ("a", "b", "c/d", "e", "d", "refs/heads/b")]
    kept, dropped = pass_through(HasRef(kind="has_ref", refs="refs.txt"), rows, tmp_path)
    assert ids(kept) == ["a", "b", "c/d", "e"]
    assert set(dropped.values()) == {"no such branch or tag"}


def test_branches_are_asked_for_at_the_repository_of_each_row(tmp_path):
    for name in ("one", "two"):
        words = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        for command in (["init", "-q", name], ["-C", name, *words, "commit", "-q", "--allow-empty", "-m", "x"]):
            subprocess.run(["git", *command], cwd=tmp_path, check=True)
        subprocess.run(["git", "-C", name, "branch", f"bug-{name}"], cwd=tmp_path, check=True)
    rows = [
        {"id": f"{repo}:{branch}", "repo": repo, "b": branch} for repo in ("one", "two") for branch in ("bug-one", "x")
    ]
    step = HasRef(kind="has_ref", column="b", remote=f"{tmp_path}/{{repo}}")
    assert ids(pass_through(step, rows, tmp_path)[0]) == ["one:bug-one"]
    with pytest.raises(ConfigError, match=r"git ls-remote .*three failed"):
        pass_through(step, [{"id": "x", "repo": "three", "b": "x"}], tmp_path)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("Django/django", "django/django"),
        ("django__django", "django/django"),
        ("swesmith/django__django.a1b2c3d4", "django/django"),
        ("https://github.com/django/django.git", "django/django"),
        ("git@github.com:django/django.git", "django/django"),
        ("swesmith/moment__moment.js.0011223", "moment/moment.js"),
        ("owner__name.js", "owner/name.js"),
        ("toolz", "toolz"),
    ],
)
def test_repositories_have_one_name(name, same):
    assert repository(name) == same


def test_rows_of_the_evaluation_are_dropped_by_repository_and_by_statement(tmp_path):
    statement = "The sum of two numbers that are both negative comes out with the wrong sign"
    (tmp_path / "bench.jsonl").write_text(json.dumps({"repo": "sympy/sympy", "problem_statement": statement}) + "\n")
    rows = [
        {"id": "listed", "repo": "swesmith/django__django.a1b2c3d4"},
        {"id": "bench", "repo": "sympy__sympy"},
        {"id": "bare", "repo": "Sympy"},
        {"id": "fork", "repo": "somebody/sympy"},
        {"id": "copied", "repo": "a/b", "problem_statement": f"Hi!\n{statement.upper()}, says my colleague"},
        {"id": "near", "repo": "a/b", "problem_statement": "the sum of two numbers is odd"},
        {"id": "none", "repo": "a/b", "problem_statement": None},
    ]
    step = Decontaminate(kind="decontaminate", repos=["django/django"], rows=["bench.jsonl"], ngram=8)
    kept, dropped = pass_through(step, rows, tmp_path)
    assert ids(kept) == ["fork", "near", "none"]
    assert dropped.pop("copied") == "statement of the evaluation"
    assert set(dropped.values()) == {"repository of the evaluation"}


def test_what_a_probe_saw_becomes_columns_and_the_last_word_counts(tmp_path):
    seen = [("a", 8, 3), ("b", 8, 0), ("gone", 8, 8), ("lost", 0, 0), ("a", 7, 4)]
    results = tmp_path / "results.jsonl"
    write_rows(results, [dict(zip(("id", "rollouts", "successes"), each, strict=True)) for each in seen])
    rows = [{"id": name} for name in ("a", "b", "lost", "new")]
    kept, dropped = pass_through(Probe(kind="probe", results="x"), rows, tmp_path, results=results)
    assert kept == [
        {"id": "a", "probe_rollouts": 7, "probe_successes": 4},
        {"id": "b", "probe_rollouts": 8, "probe_successes": 0},
    ]
    assert dropped == dict.fromkeys(("lost", "new"), "no rollout was judged")


def probed(num_always, num_mixed, num_never):
    counts = [4] * num_always + [1 + number % 3 for number in range(num_mixed)] + [0] * num_never
    return [{"id": f"{n:03}", "probe_rollouts": 4, "probe_successes": count} for n, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("settings", "num_mixed", "num_never"),
    [({}, 20, 30), ({"unsolved": 7}, 20, 7), ({"mixed": 5, "unsolved": 0}, 5, 0), ({"mixed": 50}, 20, 30)],
)
def test_selection_keeps_what_was_sometimes_solved_and_a_sample_of_the_rest(tmp_path, settings, num_mixed, num_never):
    rows = probed(10, 20, 30)
    kept, dropped = pass_through(Select(kind="select", **settings), rows, tmp_path)
    assert Counter(bool(row["probe_successes"]) for row in kept) == Counter({True: num_mixed, False: num_never})
    assert sum(reason == "always solved" for reason in dropped.values()) == 10


def test_what_is_drawn_depends_on_the_seed_and_not_on_the_order_of_rows(tmp_path):
    rows, step = probed(0, 0, 60), Select(kind="select", unsolved=10)
    drawn = sorted(ids(pass_through(step, rows, tmp_path)[0]))
    assert sorted(ids(pass_through(step, rows[::-1], tmp_path)[0])) == drawn
    context = Context(id="id", seed="1", base=tmp_path, rows=lambda: iter(rows))
    assert sorted(row["id"] for row in rows if not isinstance(decider(step, context)(row), Dropped)) != drawn


def test_no_repository_is_on_both_sides_of_a_split(tmp_path):
    sizes = {"a/big": 50, **{f"a/r{number}": 5 for number in range(10)}}
    rows = [{"id": f"{repo}{n}", "repo": repo} for repo, size in sizes.items() for n in range(size)]
    kept, _ = pass_through(Split(kind="split", heldout=0.2), rows, tmp_path)
    sides = {side: {row["repo"] for row in kept if row["split"] == side} for side in ("train", "heldout")}
    assert not sides["train"] & sides["heldout"]
    assert sum(row["split"] == "heldout" for row in kept) == 20
    kept, _ = pass_through(Split(kind="split", by="task", heldout=0.25), rows, tmp_path)
    assert sum(row["split"] == "heldout" for row in kept) == 25
    assert {row["repo"] for row in kept if row["split"] == "heldout"} & sides["train"]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst", "t.parquet"])
def test_rows_are_read_as_they_were_written(tmp_path, name):
    rows = [{"id": f"{n}", "tests": ["a"] * (n % 3), "text": None if n < 100 else "é\n", "n": n} for n in range(150)]
    assert write_rows(tmp_path / name, iter(rows)) == 150
    assert list(read_rows(tmp_path / name)) == rows
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\nnonsense\n', "t.jsonl, line 2: not JSON"),
        ("[1]\n", "t.jsonl, line 1: want an object"),
    ],
)
def test_broken_rows_are_named(tmp_path, text, message):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(read_rows(tmp_path / "t.jsonl"))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ('[[steps]]\nkind = "not_empty"\ncolum = "x"', "unknown key 'steps.0.colum'"),
        ('[[steps]]\nkind = "has_ref"', "steps.0: say where refs are known from"),
        ('[[steps]]\nkind = "probe"\nrun = "a"\nresults = "b"', "set either run or results"),
        ('[[steps]]\nkind = "decontaminate"\nrepos = ["a/b"]\nngram = 5', "ngram = 5 compares statements"),
        ('[[steps]]\nkind = "select"', "select needs a probe before it"),
        ('[[steps]]\nkind = "shuffle"', "steps.0"),
        ("", "key 'steps' is missing"),
    ],
)
def test_settings_that_make_no_sense_are_named(tmp_path, steps, message):
    (tmp_path / "c.toml").write_text(f'name = "x"\ninput = ["t.jsonl"]\n{steps}\n')
    with pytest.raises(ConfigError, match=message):
        load_curation(tmp_path / "c.toml")


def test_steps_can_be_overridden_by_their_number(tmp_path):
    (tmp_path / "c.toml").write_text(
        'name = "x"\ninput = ["t"]\n[[steps]]\nkind = "at_most"\n[[steps]]\nkind = "not_empty"'
    )
    config = load_curation(tmp_path / "c.toml", ["steps.0.max=9", "steps.1.column=text", "seed=3"])
    assert (config.steps[0].max, config.steps[1].column, config.seed) == (9, "text", 3)
