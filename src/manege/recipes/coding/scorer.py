"""The reward: 1 if every test that the task names passes on the agent's package (SWE-bench's "resolved"), else 0.

The tests that show the bug come back as they were published; the others are as they were before the agent
(`scorer.restore`). See `judging` for the run of the tests.
"""

from pathlib import Path

from manege.controller.record import AttemptRecord
from manege.recipes.coding.judging import Judgement, judge_package
from manege.types import JsonObject, Task

__all__ = ["judge", "score", "score_parts"]


def score(task: Task, attempt: AttemptRecord) -> JsonObject:
    """All or nothing."""
    found = judge(task, attempt.workspace, Path.cwd())
    return {"reward": float(found.repaired * found.kept == 1), "message": found.message, "hacks": list(found.hacks)}


def score_parts(task: Task, attempt: AttemptRecord) -> JsonObject:
    """Half a point at most for a part: the share of broken tests that pass now, times that of the others."""
    found = judge(task, attempt.workspace, Path.cwd())
    share = found.repaired * found.kept
    return {"reward": share if share == 1 else share / 2, "message": found.message, "hacks": list(found.hacks)}


def judge(task: Task, workspace: Path, scratch: Path) -> Judgement:
    """`scratch`: for what the tests leave."""
    return judge_package(task.hidden, workspace, scratch, python=Path(task.input["environment"], "bin", "python"))
