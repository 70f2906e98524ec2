"""The reward of a response: 1 if it follows all instructions of its prompt, strictly, else 0."""

from manege.controller.record import AttemptRecord
from manege.recipes.general.ifeval.accuracy import judge
from manege.types import Task

__all__ = ["score"]


def score(task: Task, attempt: AttemptRecord) -> float:
    """The response is what the agent printed."""
    followed = judge(attempt.stdout, task.hidden["instruction_id_list"], task.hidden["kwargs"])
    return float(all(followed.strict))
