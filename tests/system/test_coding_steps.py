"""The reward in steps of the coding recipe: what each step is worth, by recorded calls and real tests."""

import contextlib
import shutil

import pytest

from manege.controller.record import AttemptRecord
from manege.recipes.coding.steps import score
from manege.recipes.coding.tasks import prepare
from tests.calls import make_call
from tests.system.coding_case import BUG, MODULE, PACKAGE, RIGHT, prepared, task_of

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
LOOK = f"grep -n upper {MODULE}"
HARMLESS, HARMFUL = ("import re\n", "import re  # rules\n"), ("return ", "return None and ")


@pytest.mark.parametrize(
    ("said", "edit", "reward"),
    [
        ([], None, 0.0),
        (["I would look at the code.", "It is broken."], None, 0.0),
        (["ls", SUBMIT], None, 0.05),
        ([SUBMIT], None, 0.1),
        ([LOOK, "Well."], None, 0.25),
        ([LOOK, SUBMIT], None, 0.4),
        ([LOOK, "sed -i s/re/re/ x", SUBMIT], HARMLESS, 0.5),
        ([LOOK, "sed -i s/re/re/ x", SUBMIT], HARMFUL, 0.4),
        ([LOOK, "sed -i s/0/1/ x", SUBMIT], (BUG, RIGHT), 1.0),
    ],
    ids=["nothing", "talk", "half commands", "hands in unseen", "looks", "hands in", "changes", "breaks", "repairs"],
)
def test_each_step_is_worth_what_the_page_says(tmp_path, said, edit, reward):
    task = task_of(prepared())
    workspace = tmp_path / "workspace"
    shutil.copytree(prepared().source(PACKAGE.name), workspace)
    prepare(task, workspace)
    lines = (workspace / MODULE).read_text().splitlines()
    shown = "27:" + next(line for line in lines if BUG in line) if LOOK in said else "nothing"
    if edit:
        text = (workspace / MODULE).read_text()
        (workspace / MODULE).write_text(text.replace(*edit))
    calls = [
        make_call(
            f"c{turn}",
            [1],
            [2],
            request={"messages": [{"role": "user", "content": "camelize is broken" if turn == 0 else shown}]},
            reply={"content": text},
        )
        for turn, text in enumerate(said)
    ]
    left = AttemptRecord(workspace=workspace, stdout="", stderr="", exit_code=0, timed_out=False, calls=calls)
    (tmp_path / "scratch").mkdir()
    with contextlib.chdir(tmp_path / "scratch"):
        assert score(task, left)["reward"] == pytest.approx(reward)
