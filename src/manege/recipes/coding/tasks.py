"""Tasks from rows in SWE-smith's columns, for packages that the builder prepared on this machine.

What the agent may see: the issue, and where environment and source lie, of which it can read the environment alone.
Hidden: the patch that puts the bug in, the tests and the files that they stand in. Those files are not in the
workspace; the scorer brings them back.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manege.errors import ConfigError
from manege.recipes.coding import patches
from manege.recipes.coding.packages import Package, known
from manege.recipes.coding.places import Places, default_folder
from manege.recipes.coding.suite import test_file
from manege.types import Task

__all__ = ["load", "prepare", "to_task"]

_HELDOUT_OF = 5
"""Every so many packages is held out."""


def load(
    *, split: str, num: int | None, seed: int, folder: str | None = None, file: str | None = None
) -> Sequence[Task]:
    """`folder`: of the builder; None: its default. `file`: JSONL to read instead of the folder's `tasks.jsonl`; with
    `{split}` in its name it is split already, else whole packages are held out. Raises ConfigError."""
    places = Places(Path(folder).expanduser().absolute() if folder else default_folder())
    path = Path(file.replace("{split}", split)).expanduser() if file else places.tasks
    packages = {package.release: package for package in known()}
    tasks = []
    for row in _rows(path):
        release = row["instance_id"].rpartition("__")[0].rpartition(".")[0]
        package = packages.get(release)
        if package is None or not places.python(package.name).exists():
            raise ConfigError(
                f"task {row['instance_id']!r} of {path}: {release} is not prepared in {places.folder}; "
                f"run python -m manege.recipes.coding.build {places.folder}"
            )
        if (file and "{split}" in file) or _is_heldout(package) == (split == "heldout"):
            tasks.append(to_task(row, package, places))
    if split != "heldout":
        random.Random(seed).shuffle(tasks)
    return tasks[:num]


def to_task(row: Mapping[str, Any], package: Package, places: Places) -> Task:
    """One row."""
    source = places.source(package.name)
    failing, passing = row["FAIL_TO_PASS"], row["PASS_TO_PASS"]
    hidden = {test_file(test) for test in failing}
    return Task(
        id=row["instance_id"],
        input={
            "problem_statement": row["problem_statement"],
            "package": package.name,
            "source": str(source),
            "environment": str(places.environment(package.name)),
        },
        hidden={
            "patch": row["patch"],
            "path": package.path,
            "FAIL_TO_PASS": failing,
            "PASS_TO_PASS": passing,
            "files": {path: (source / path).read_bytes().decode() for path in sorted(hidden)},
        },
    )


def prepare(task: Task, workspace: Path) -> None:
    """Put the bug in, and take the tests out that show it. Raises HarnessError."""
    patches.apply(task.hidden["patch"], workspace)
    for path in task.hidden["files"]:
        (workspace / path).unlink()


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; run python -m manege.recipes.coding.build") from error


def _is_heldout(package: Package) -> bool:
    """By its name alone, so that another package more moves none from one side to the other."""
    return int(hashlib.sha256(package.name.encode()).hexdigest(), 16) % _HELDOUT_OF == 0
