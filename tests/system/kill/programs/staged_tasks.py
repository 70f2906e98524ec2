"""Tasks whose setup and scorer wait for as long as a file `hold-setup` or `hold-score` lies in a folder of the test.

`stage/agents/` holds files that every workspace gets: what its agent shall do. A scorer says what it gives before it
gives it.
"""

import json
import os
import time
from pathlib import Path

from manege.types import Task


def generate(*, split, num, seed, stage):
    return [Task(id=f"{split}{number}", input={}, hidden={"stage": stage}) for number in range(num)]


def prepare(task, workspace):
    stage = Path(task.hidden["stage"])
    wait_while(stage / "hold-setup")
    for order in (stage / "agents").iterdir():
        (workspace / order.name).touch()


def fail(task, workspace):
    raise RuntimeError("no such image")


def score(task, attempt):
    """The members of a group differ, so that there is something to learn."""
    stage, name = Path(task.hidden["stage"]), attempt.workspace.parent.name
    if name.endswith(".control"):
        return 0.0
    wait_while(stage / "hold-score")
    reward = float(name.rpartition(".")[0].rpartition("-")[2])
    print(json.dumps({"reward": reward}), flush=True)
    os.fsync(1)
    return reward


def wait_while(path):
    while path.exists():
        time.sleep(0.02)
