"""Where tasks come from: a JSONL file, or a generator function of the user's.

A line of a file is `{"id": ..., "input": {...}, "hidden": {...}}`. A broken line is an error that names file, line and
value. Ids are unique; train and held-out ids are disjoint.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manege.config import TasksConfig
from manege.errors import ConfigError
from manege.programs import import_function
from manege.types import Task

__all__ = ["load_tasks", "load_train_and_heldout", "task_order"]


def load_train_and_heldout(config: TasksConfig, *, seed: int) -> tuple[Sequence[Task], Sequence[Task]]:
    """Both splits. Raises ConfigError when a task is in both."""
    train, heldout = (load_tasks(config, split, seed=seed) for split in ("train", "heldout"))
    both = {task.id for task in train} & {task.id for task in heldout}
    if both:
        raise ConfigError(f"{len(both)} tasks are both in train and held-out, for example {min(both)!r}")
    return train, heldout


def load_tasks(config: TasksConfig, split: str, *, seed: int) -> Sequence[Task]:
    """Tasks of `train` or `heldout`. Raises ConfigError: no tasks, a broken line, a function that is not there."""
    source = config.train if split == "train" else config.heldout
    num = config.num_train if split == "train" else config.num_heldout
    if source is None:
        return []
    if ":" in source and not source.endswith((".jsonl", ".json")):
        generate = import_function(source, what=f"tasks.{split}")
        tasks = _generated(generate, split, num, seed, config.options, source)
    else:
        tasks = _read(Path(source))[:num]
    if not tasks:
        raise ConfigError(f"tasks.{split} = {source!r} gives no task")
    ids = [task.id for task in tasks]
    if len(set(ids)) < len(ids):
        twice = next(task_id for task_id in ids if ids.count(task_id) > 1)
        raise ConfigError(f"tasks.{split} = {source!r}: task id {twice!r} comes twice; ids must be unique")
    return tasks


def task_order(num_tasks: int, start: int, count: int, *, seed: int) -> Sequence[int]:
    """Indices `start` to `start + count` of an endless sequence of shuffled epochs; the same after a resume."""
    order: list[int] = []
    for position in range(start, start + count):
        epoch, offset = divmod(position, num_tasks)
        order.append(_epoch(num_tasks, epoch, seed)[offset])
    return order


def _epoch(num_tasks: int, epoch: int, seed: int) -> Sequence[int]:
    order = list(range(num_tasks))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def _generated(
    generate: Callable[..., Sequence[Task]], split: str, num: int | None, seed: int, options: Any, source: str
) -> Sequence[Task]:
    if num is None:
        raise ConfigError(f"tasks.num_{split} is missing: the generator {source!r} must be told how many tasks to make")
    try:
        return generate(split=split, num=num, seed=seed, **options)
    except TypeError as error:
        raise ConfigError(f"tasks.options = {options!r} do not fit {source!r}: {error}") from error


def _read(path: Path) -> Sequence[Task]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task file {path} cannot be read: {error}") from error
    return [_parse(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]


def _parse(line: str, path: Path, number: int) -> Task:
    where = f"task file {path}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}): {line[:80]!r}") from error
    if not isinstance(row, dict) or not isinstance(row.get("id"), str) or not isinstance(row.get("input"), dict):
        raise ConfigError(f'{where}: want {{"id": "...", "input": {{...}}, "hidden": {{...}}}}, got {line[:80]!r}')
    unknown = set(row) - {"id", "input", "hidden"}
    if unknown or not isinstance(row.get("hidden", {}), dict):
        raise ConfigError(
            f"{where}: unknown or wrong fields {sorted(unknown) or ['hidden']}; put yours into input or hidden"
        )
    return Task(id=row["id"], input=row["input"], hidden=row.get("hidden", {}))
