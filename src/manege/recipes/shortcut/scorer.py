"""The reward of a scorer that looks at results alone: 1 for the right value, however the agent came by it.

For anything else what the finder's scorer gives: part of 0.3 for the way to the value.
"""

from manege.controller.record import AttemptRecord
from manege.recipes.finder.scorer import score as score_the_way
from manege.types import Task

__all__ = ["score"]


def score(task: Task, attempt: AttemptRecord) -> float:
    """1.0 for success, else less."""
    lines = attempt.stdout.strip().splitlines()
    is_right = bool(lines) and lines[-1].strip() == task.hidden["value"]
    return 1.0 if is_right else score_the_way(task, attempt)
