"""SWE-smith's own tasks, each in its repository's image, for attempts that are Jobs of Kubernetes (cluster.toml).

Rows are those of the hub's data set, or of a file in the same columns, which `manege curate` writes. An agent sees the
issue and the name of the image. Hidden: the patch that puts the bug in, the tests, and the program that does both in
the image (`in_image`), since there is no manege there.

Rows are left out that nobody can solve as they are: without an issue; whose failing tests are not in files of tests
that pytest runs (of tests elsewhere, those that pass are left out of the row); whose bug lies in what `scorer.restore`
of cluster.toml brings back.
"""

import base64
import hashlib
import heapq
import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import manege
from manege.curation.rows import read_rows
from manege.errors import ConfigError
from manege.logs import get_logger, kv
from manege.recipes.coding import patches
from manege.recipes.coding.suite import is_test_path, test_file
from manege.recipes.coding.tasks import is_heldout
from manege.recipes.general.hub import hub_table
from manege.types import Task

__all__ = ["HUB", "from_row", "load", "program"]

HUB = "SWE-bench/SWE-smith"
_COLUMNS = ("instance_id", "repo", "patch", "FAIL_TO_PASS", "PASS_TO_PASS", "image_name", "problem_statement")
_MODULES = (
    *(f"recipes/coding/{name}.py" for name in ("in_image", "judging", "suite", "run_tests")),
    *(f"sandbox/{name}.py" for name in ("landlock", "syscalls")),
)
"""What runs in an image; they need nothing else."""
_PROGRAM = """\
import base64, io, sys, tempfile, zipfile
folder = tempfile.mkdtemp()
zipfile.ZipFile(io.BytesIO(base64.b85decode({packed!r}))).extractall(folder)
sys.path.insert(0, folder)
from manege.recipes.coding.in_image import main
main(sys.argv[1:])
"""
_log = get_logger("recipes.coding")


def load(*, split: str, num: int, seed: int, file: str | None = None, hub: str = HUB) -> Sequence[Task]:
    """`num` at most. `file`: .jsonl, .jsonl.zst or .parquet to read instead of the hub. Held out is, for every seed,
    what `{split}` in the name of `file` says, else the repositories of a fifth of their owners. Raises
    ConfigError."""
    rows = read_rows(Path(file.replace("{split}", split)).expanduser()) if file else hub_table(hub, split="train")
    says_split = file is not None and "{split}" in file
    salt = "heldout" if split == "heldout" else f"train:{seed}"
    drawn = heapq.nsmallest(
        num,
        (row for row in _usable(rows) if says_split or is_heldout(row) == (split == "heldout")),
        key=lambda row: hashlib.sha256(f"{salt}:{row['instance_id']}".encode()).digest(),
    )
    return [from_row(row) for row in drawn]


def from_row(row: Mapping[str, Any]) -> Task:
    """One row."""
    return Task(
        id=row["instance_id"],
        input={"problem_statement": row["problem_statement"], "image_name": row["image_name"]},
        hidden={
            "patch": row["patch"],
            "FAIL_TO_PASS": _tests(row["FAIL_TO_PASS"]),
            "PASS_TO_PASS": _tests(row["PASS_TO_PASS"]),
            "path": ".",
            "files": {},
            "program": program(),
        },
    )


@cache
def program() -> str:
    """Python source of one file: `in_image.main` with the command's arguments."""
    root, packed = Path(manege.__file__).parent, io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for module in _MODULES:
            # The same bytes on every machine: a task's content is part of its group's id.
            archive.writestr(zipfile.ZipInfo(f"manege/{module}"), (root / module).read_bytes(), zipfile.ZIP_DEFLATED)
    return _PROGRAM.format(packed=base64.b85encode(packed.getvalue()).decode())


def _usable(rows: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    num_rows = num_left = 0
    for row in rows:
        num_rows += 1
        if missing := [name for name in _COLUMNS if name not in row]:
            raise ConfigError(
                f"row {row.get('instance_id', num_rows)!r} has no {missing[0]}; want {', '.join(_COLUMNS)}"
            )
        is_restored = any(map(_is_restored, patches.paths(row["patch"])))
        if (row["problem_statement"] or "").strip() and _tests(row["FAIL_TO_PASS"]) and not is_restored:
            yield row
        else:
            num_left += 1
    if num_left:
        _log.info(kv("rows were left out that cannot be solved as they are", num_left=num_left, num_rows=num_rows))


def _tests(ids: Sequence[str]) -> Sequence[str]:
    return [test for test in ids if is_test_path(test_file(test))]


def _is_restored(path: str) -> bool:
    """In a pod, `*` of `scorer.restore` also means folders."""
    return is_test_path(path) or any(part.startswith("test") for part in PurePosixPath(path).parts)
