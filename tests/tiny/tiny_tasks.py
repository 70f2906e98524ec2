"""Two letters and a number: `q a`, file a says `go b`, file b says `is 42`, the answer is `ans 42`."""

import random
import string

from manege.types import Task


def generate(*, split, num, seed):
    rng = random.Random(f"{split}:{0 if split == 'heldout' else seed}")
    tasks = {}
    while len(tasks) < num:
        first, second = rng.sample(string.ascii_lowercase, 2)
        value = rng.randint(10, 99)
        if (value % 5 == 0) == (split == "heldout"):
            name = f"{first}{second}{value}"
            tasks[name] = Task(id=name, input={"first": first}, hidden={"second": second, "value": str(value)})
    return list(tasks.values())


def prepare(task, workspace):
    (workspace / task.input["first"]).write_text(f"go {task.hidden['second']}")
    (workspace / task.hidden["second"]).write_text(f"is {task.hidden['value']}")


def score(task, attempt):
    shown = [m["content"] for call in attempt.calls for m in call.request["messages"] if m["role"] == "user"]
    found = f"is {task.hidden['value']}" in shown
    if found and attempt.stdout.strip() == f"ans {task.hidden['value']}":
        return 1.0
    return 0.3 * found or 0.1 * (f"go {task.hidden['second']}" in shown)
