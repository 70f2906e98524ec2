"""Tasks of all families, from a seed; how their files come into the workspace.

What the agent may see is the question alone, and the files; all else is hidden.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from manege.errors import ConfigError
from manege.recipes.general.draw import Draw
from manege.recipes.general.families import FAMILIES
from manege.recipes.general.left import ANSWER
from manege.types import Task

__all__ = ["generate", "how_to_answer", "prepare"]


def generate(
    *,
    split: str,
    num: int,
    seed: int,
    families: Sequence[str] = tuple(FAMILIES),
    levels: Sequence[int] = (1, 2, 3, 4, 5),
) -> Sequence[Task]:
    """The families in turn, each at one of the levels. Held-out tasks do not depend on the seed: every run is judged on
    the same ones. Raises ConfigError for a family or level that there is not."""
    if unknown := sorted({*families} - {*FAMILIES}):
        raise ConfigError(f"tasks.options.families: there is no family {unknown[0]!r}; known are {', '.join(FAMILIES)}")
    if not families or not levels or not {*levels} <= {1, 2, 3, 4, 5}:
        raise ConfigError(f"tasks.options: families = {list(families)}, levels = {list(levels)}; levels are 1 to 5")
    heldout = split == "heldout"
    rng = random.Random("heldout" if heldout else f"train:{seed}")
    draw = Draw(rng, heldout=heldout)
    return [_task(draw, f"{split}-{n}", families[n % len(families)], rng.choice(levels)) for n in range(num)]


def _task(draw: Draw, name: str, family: str, level: int) -> Task:
    problem = FAMILIES[family].make(draw, level)
    how = how_to_answer() if problem.answers else ""
    return Task(
        id=f"{family}{level}-{name}",
        input={"question": problem.question, "task": problem.question + how},
        hidden={"family": family, "files": dict(problem.files), **problem.hidden},
    )


def how_to_answer() -> str:
    """For an agent that was not made for these tasks."""
    return f" Write the answer, and nothing else, to {ANSWER}."


def prepare(task: Task, workspace: Path) -> None:
    """Write the task's files."""
    for name, text in task.hidden["files"].items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
