"""Tasks of the finder: a question, and files that lead to the value by up to two pointers.

Train and held-out tasks never share a value: the last digit of the value decides the split.
"""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

from manege.types import Task

__all__ = ["generate", "prepare"]

FILES = ("notes.txt", "key.txt", "port.txt", "log.txt", "todo.txt", "data.txt", "user.txt", "code.txt")
TARGETS = ("port", "key", "code", "id")
HELDOUT_DIGITS = "37"


def generate(*, split: str, num: int, seed: int, hops: Sequence[int] = (0, 1, 2)) -> Sequence[Task]:
    """`num` tasks whose pointer chains have one of the lengths `hops`.

    Held-out tasks do not depend on the seed: every run is judged on the same ones.
    """
    rng = random.Random("heldout" if split == "heldout" else f"train:{seed}")
    tasks: dict[str, Task] = {}
    while len(tasks) < num:
        task = _task(rng, split, tuple(hops))
        tasks[task.id] = task
    return list(tasks.values())


def prepare(task: Task, workspace: Path) -> None:
    """Write the task's files."""
    for name, text in task.hidden["files"].items():
        (workspace / name).write_text(text + "\n", encoding="utf-8")


def _task(rng: random.Random, split: str, hops: Sequence[int]) -> Task:
    chain = rng.sample(FILES, rng.choice(hops) + 1)
    target = rng.choice(TARGETS)
    value = str(rng.randint(100, 999))
    while (value[-1] in HELDOUT_DIGITS) != (split == "heldout"):
        value = str(rng.randint(100, 999))
    files = {name: f"moved to {after}" for name, after in itertools.pairwise(chain)}
    files[chain[-1]] = f"{target}={value}"
    return Task(
        id=f"{target}-{value}-{'-'.join(name.removesuffix('.txt') for name in chain)}",
        input={"question": f"What is the {target}? It is in {chain[0]}."},
        hidden={"value": value, "chain": chain, "files": files},
    )
