"""Letters to find: each letter's file holds a value, a capital letter; the answer names every letter and its value.

Two kinds of task for the same agent and model, chosen by `num_letters`:
    retry  (1 letter)   the untrained model fails by asking in vain until its turns are used up: failures fall into
                        more samples than successes
    gather (2 letters)  it fails by answering before it has everything: successes fall into more samples, until it has
                        learnt to ask on, after which failures do
"""

import random
import string
from collections.abc import Sequence
from pathlib import Path

from benchmarks.credit_ablation.agent import NOTHING
from manege.controller.record import AttemptRecord
from manege.types import Task

KINDS = {"retry": 1, "gather": 2}
"""Letters of a task, by kind."""


def generate(*, split: str, num: int, seed: int, num_letters: int) -> Sequence[Task]:
    """Distinct tasks; a task whose first value is one of every fifth capital letter is held out."""
    rng = random.Random(f"{split}:{num_letters}:{0 if split == 'heldout' else seed}")
    tasks: dict[str, Task] = {}
    while len(tasks) < num:
        letters = "".join(rng.sample(string.ascii_lowercase, num_letters))
        values = "".join(rng.sample(string.ascii_uppercase, num_letters))
        if (ord(values[0]) % 5 == 0) == (split == "heldout"):
            files = dict(zip(letters, values, strict=True))
            tasks[letters + values] = Task(id=letters + values, input={"letters": letters}, hidden={"files": files})
    return list(tasks.values())


def read(task: Task, letter: str) -> str:
    """What the agent sees in the file of that letter."""
    return task.hidden["files"].get(letter, NOTHING)


def reward(task: Task, answer: str) -> float:
    """1 for every letter with its value, in order; else 0."""
    return float(answer == "".join(letter + value for letter, value in task.hidden["files"].items()))


def prepare(task: Task, workspace: Path) -> None:
    """The files, for a real run."""
    for letter in task.hidden["files"]:
        (workspace / letter).write_text(read(task, letter))


def score(task: Task, attempt: AttemptRecord) -> float:
    """The reward of a real run."""
    return reward(task, attempt.stdout.strip())
