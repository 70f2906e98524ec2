"""The reward: what the task's family says of the files and the answer that the agent left."""

from manege.controller.record import AttemptRecord
from manege.recipes.general.families import FAMILIES
from manege.recipes.general.left import Left
from manege.types import Task

__all__ = ["score"]


def score(task: Task, attempt: AttemptRecord) -> float:
    """1 for success, at most half of that for a part of it."""
    left = Left(workspace=attempt.workspace, stdout=attempt.stdout)
    return FAMILIES[task.hidden["family"]].score(task.hidden, left)
