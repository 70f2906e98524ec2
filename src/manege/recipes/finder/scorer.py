"""The finder's reward: 1 for the right value that the agent has really read, else part of 0.3 for the way to it.

What the agent did is read from the model calls that the gateway recorded, not from anything the agent could write.
"""

from manege.controller.record import AttemptRecord
from manege.types import Task

__all__ = ["score"]

PART = 0.3
"""For having read the whole chain without reporting the value."""


def score(task: Task, attempt: AttemptRecord) -> float:
    """1.0 for success; else PART times the share of the chain whose content the agent has seen."""
    seen = "\n".join(
        str(message.get("content"))
        for call in attempt.calls
        for message in call.request.get("messages", [])
        if message.get("role") == "user"
    )
    contents = [task.hidden["files"][name] for name in task.hidden["chain"]]
    share = sum(content in seen for content in contents) / len(contents)
    lines = attempt.stdout.strip().splitlines()
    reported = lines[-1].strip() if lines else ""
    if share == 1 and reported == task.hidden["value"]:
        return 1.0
    return PART * share
