"""A reward with steps, for a model too small to repair anything: up to half a point for working as one would.

| step | worth |
|---|---|
| answers that are one command | 0.1 for all, else their share of it |
| a command showed the line with the bug | 0.2 |
| the file with the bug was changed, and no other test fails | 0.1 |
| the work was handed in, after that line was seen | 0.1 |
| every named test passes | 1, instead of all that |

What the agent did is read from the calls that the gateway recorded, and from what tests say, not from its own words.
"""

import hashlib
import re
from pathlib import Path

from manege.controller.record import AttemptRecord
from manege.recipes.coding.judging import Judgement
from manege.recipes.coding.scorer import judge
from manege.types import JsonObject, Task

__all__ = ["score"]

_COMMAND = re.compile(r"\A\s*(?:Command:\s*)?((?:grep|sed|cat|python|echo)\b[^\n]*)")
"""As in harness/mini.yaml."""
_UNCHANGED = Judgement(repaired=0.0, kept=1.0, message="nothing was changed")
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def score(task: Task, attempt: AttemptRecord) -> JsonObject:
    """Reward and what it is made of."""
    said = [_COMMAND.findall(str(call.reply.get("content") or "")) for call in attempt.calls]
    commands = [found[0].strip() for found in said if len(found) == 1]
    shown = "\n".join(str(message.get("content")) for call in attempt.calls[1:] for message in call.request["messages"])
    path = task.hidden["code"]
    bug = [line[1:].strip() for line in task.hidden["patch"].splitlines()[4:] if line[0] == "+"]
    has_seen = any(line and line in shown for line in bug) or (not bug and path in shown)
    has_changed = _digest(attempt.workspace / path) != task.hidden["broken"]
    found = judge(task, attempt.workspace, Path.cwd()) if has_changed else _UNCHANGED
    steps = {
        "commands": 0.1 * len(commands) / max(1, len(said)),
        "seen": 0.2 * has_seen,
        "changed": 0.1 * (has_changed and found.kept == 1),
        "submitted": 0.1 * (has_seen and commands[-1:] == [_SUBMIT]),
    }
    told = ", ".join(f"{name} {worth:.2f}" for name, worth in steps.items())
    reward = 1.0 if found.repaired * found.kept == 1 else sum(steps.values())
    return {"reward": reward, "message": f"{told}; {found.message}", "hacks": list(found.hacks)}


def _digest(file: Path) -> str | None:
    """None: there is none any more."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
