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
from manege.recipes.coding.mutate import functions
from manege.recipes.coding.packages import Package, known
from manege.recipes.coding.places import Places, default_folder
from manege.recipes.coding.suite import test_file
from manege.types import Task

__all__ = ["from_row", "is_heldout", "load", "prepare", "to_task"]

_HELDOUT_OF = 5
"""One of so many is held out."""


def load(
    *,
    split: str,
    num: int,
    seed: int,
    folder: str | None = None,
    file: str | None = None,
    packages: Sequence[str] = (),
    locate: bool = False,
) -> Sequence[Task]:
    """`num` at most. `folder`: of the builder; None: its default. `file`: JSONL to read instead of the folder's
    `tasks.jsonl`. What is held out is the same for every seed: with `{split}` in the name of `file`, what it says; with
    `packages`, of which alone tasks are taken, a fifth of their tasks; else a fifth of all packages. `locate`: name the
    function, in the field `place`. Raises ConfigError."""
    places = Places(Path(folder).expanduser().absolute() if folder else default_folder())
    path = Path(file.replace("{split}", split)).expanduser() if file else places.tasks
    prepared = {package.release: package for package in known() if places.python(package.name).exists()}
    tasks = []
    for row in _rows(path):
        package = prepared.get(row["instance_id"].rpartition("__")[0].rpartition(".")[0])
        if package is None:
            raise ConfigError(
                f"task {row['instance_id']!r} of {path}: its package is not prepared in {places.folder}; run "
                "python -m manege.recipes.coding.build"
            )
        if packages and package.name not in packages:
            continue
        if (file and "{split}" in file) or is_heldout(row, packages) == (split == "heldout"):
            tasks.append(to_task(row, package, places, locate=locate))
    if split != "heldout":
        random.Random(seed).shuffle(tasks)
    return tasks[:num]


def from_row(row: Mapping[str, Any]) -> Task:
    """One row whose package is prepared in the default folder, for `manege curate`. Raises ConfigError."""
    places = Places(default_folder())
    release = row["instance_id"].rpartition("__")[0].rpartition(".")[0]
    package = next((package for package in known() if package.release == release), None)
    if package is None or not places.python(package.name).exists():
        raise ConfigError(
            f"task {row['instance_id']!r}: its package is not prepared in {places.folder}; run "
            "python -m manege.recipes.coding.build"
        )
    return to_task(row, package, places)


def to_task(row: Mapping[str, Any], package: Package, places: Places, *, locate: bool = False) -> Task:
    """One row."""
    source, patch = places.source(package.name), row["patch"]
    (code,) = patches.paths(patch)
    text = (source / code).read_bytes().decode()
    broken = patches.applied(patch, code, text)
    place = {"place": f"{_function(text, broken)} in {code} is broken."} if locate else {}
    failing, passing = row["FAIL_TO_PASS"], row["PASS_TO_PASS"]
    files = {path: (source / path).read_bytes().decode() for path in sorted({test_file(test) for test in failing})}
    return Task(
        id=row["instance_id"],
        input={
            "problem_statement": row["problem_statement"],
            "package": package.name,
            "source": str(source),
            "environment": str(places.environment(package.name)),
            "harness_config": str(Path(__file__).with_name("harness")),
            **place,
        },
        hidden={
            "patch": patch,
            "code": code,
            "broken": hashlib.sha256(broken.encode()).hexdigest(),
            "path": package.path,
            "FAIL_TO_PASS": failing,
            "PASS_TO_PASS": passing,
            "files": files,
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


def _function(text: str, broken: str) -> str:
    """The one in which two texts of a file begin to differ."""
    pairs = zip(text.splitlines(), broken.splitlines(), strict=False)
    first = next((number for number, (one, other) in enumerate(pairs, 1) if one != other), 0)
    return [function.name for function in functions(text) if function.first_line <= first][-1]


def is_heldout(row: Mapping[str, Any], packages: Sequence[str] = ()) -> bool:
    """By its name alone, so that one task more moves none from one side to the other."""
    name = row["instance_id"] if packages else row["repo"].partition("__")[0]
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELDOUT_OF == 0
