"""Bugs, patches, issues and results of the coding tasks, without running anything."""

import json

import pytest

from manege.errors import HarnessError
from manege.recipes.coding import patches
from manege.recipes.coding.mutate import KINDS, functions, mutations
from manege.recipes.coding.packages import known, select
from manege.recipes.coding.statement import describe
from manege.recipes.coding.suite import is_test_path, read_results
from manege.recipes.coding.validate import Bug

SOURCE = '''
import os

def first(items, default=None, *, limit = 10):  # äöü
    """Of many. Then none."""
    total = 0
    for item in items:
        if item > limit and not item.done:
            total += item * 2
        elif item.skip:
            continue
        else:
            total = (item
                     - 1)
    try:
        os.remove("x")
    except OSError:
        return default if total else None
    return min(total, limit)


class Box:
    @property
    def size(self) -> int: return self.left - self.right
'''
BEFORE_AND_AFTER = {
    "op_change": ("                     - 1)", "                     + 1)"),
    "compare_flip": ("if item > limit and", "if item >= limit and"),
    "logic_change": ("limit and not", "limit or not"),
    "constant": ("    total = 0\n", "    total = 1\n"),
    "invert_if": ("elif item.skip:", "elif not (item.skip):"),
    "remove_branch": ("\n        else:\n            total = (item\n                     - 1)", ""),
    "remove_loop": (SOURCE[SOURCE.index("    for") : SOURCE.index("    try")], ""),
    "remove_assignment": ("            total += item * 2\n", "            pass\n"),
    "remove_call": ('        os.remove("x")\n', "        pass\n"),
    "remove_try": ("except OSError:", "except GeneratorExit:"),
    "swap_operands": ("self.left - self.right", "self.right - self.left"),
    "swap_arguments": ("min(total, limit)", "min(limit, total)"),
}


def test_there_is_an_example_of_every_kind():
    assert BEFORE_AND_AFTER.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", BEFORE_AND_AFTER)
def test_a_mutation_changes_one_place_and_nothing_else(kind):
    before, after = BEFORE_AND_AFTER[kind]
    texts = []
    for mutation in mutations(SOURCE):
        if mutation.kind == kind:
            texts.append(mutation.of(SOURCE))
    assert SOURCE.replace(before, after) in texts
    assert SOURCE not in texts


def test_functions_are_found_where_python_sees_them_begin():
    assert [(each.name, each.first_line) for each in functions(SOURCE)] == [("first", 4), ("Box.size", 23)]
    assert functions(SOURCE)[0].docstring == "Of many. Then none."


@pytest.mark.parametrize("before", ["a\nb\nc\n", "a\r\nb\r\nc", "a\n\x0cb\u2028b\nc", "b"])
@pytest.mark.parametrize("after", ["a\nB\nc\n", "", "b\n", "--- a/x\n+++ b/x\n@@ no\n"])
def test_a_patch_makes_the_one_text_of_the_other(before, after, tmp_path):
    patch = patches.make("folder/x.py", before, after)
    assert patches.paths(patch) == ["folder/x.py"]
    assert patches.applied(patch, "folder/x.py", before) == after
    file = tmp_path / "folder" / "x.py"
    file.parent.mkdir()
    file.write_bytes(before.encode())
    patches.apply(patch, tmp_path)
    assert file.read_bytes().decode() == after
    file.write_text("something else\n")
    with pytest.raises(HarnessError, match="does not apply"):
        patches.apply(patch, tmp_path)


def test_an_issue_tells_symptoms_and_neither_tests_nor_the_bug():
    bug = Bug(
        kind="constant",
        patch=patches.make("box/core.py", "limit = 1\n", "limit = 2\n"),
        function="box/core.py:Box.take",
        docstring="Take so many. Never more.\n\n    >>> take(1)",
        failing=["tests/test_core.py::TestBox::test_take_twice[a]", "tests/test_core.py::TestBox::test_take_twice[b]"],
        passing=[],
        messages={
            "tests/test_core.py::TestBox::test_take_twice[a]": "AssertionError: assert 2 == 1\n +  where at 0x7f00aa",
            "tests/test_core.py::TestBox::test_take_twice[b]": "OSError: /tmp/scratch/box is away",
        },
    )
    issue = describe(select(["schema"])[0], bug)
    assert "- take twice: AssertionError: assert 2 == 1" in issue
    assert 'says: "Take so many."' in issue
    for word in ("test_", "core.py", "limit", "/tmp", "constant"):
        assert word not in issue


def line(test, outcome, token="t"):
    return json.dumps({"token": token, "id": test, "outcome": outcome}) + "\n"


@pytest.mark.parametrize(
    ("text", "passed", "is_whole", "is_true"),
    [
        pytest.param(line("", "begin") + line("a", "passed") + line("", "end"), {"a"}, True, True, id="whole"),
        pytest.param(line("", "begin") + line("a", "passed"), {"a"}, False, True, id="cut off"),
        pytest.param(line("a", "failed") + line("a", "passed"), {"a"}, False, False, id="told twice"),
        pytest.param(line("a", "passed", "other"), set(), False, False, id="of somebody else"),
        pytest.param("passed\n", set(), False, False, id="no line of ours"),
        pytest.param("[]\n", set(), False, False, id="no object"),
    ],
)
def test_only_lines_of_the_programs_own_are_believed(text, passed, is_whole, is_true):
    results = read_results(text, "t")
    assert (results.passed(), results.is_whole, results.is_true) == (passed, is_whole, is_true)


def test_the_tests_of_every_package_are_restored_before_scoring():
    assert len(known()) >= 20
    for package in known():
        for tests in package.tests:
            assert is_test_path(tests if tests.endswith(".py") else f"{tests}/test_x.py"), package.name
        assert not any(is_test_path(f"{code}/x.py") for code in package.code)
