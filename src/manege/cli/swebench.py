"""SWE-bench's rows as tasks, and its own evaluation of predictions (https://github.com/SWE-bench/SWE-bench).

A row is what the hub or a file has; of it an agent sees where its repository is and what is wrong, and never the
solution, the tests, or hints from the discussion that followed.
"""

import asyncio
import importlib
import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manege.curation.rows import Row, read_rows
from manege.errors import ConfigError
from manege.types import Task

__all__ = ["DATASETS", "evaluation_command", "load_rows", "missing", "read_report", "run_evaluation", "task_of"]

DATASETS: Mapping[str, str] = {
    "swebench-verified": "SWE-bench/SWE-bench_Verified",
    "swebench-lite": "SWE-bench/SWE-bench_Lite",
    "swebench": "SWE-bench/SWE-bench",
}
_SPLIT = "test"
_NEEDED = ("instance_id", "repo", "base_commit", "problem_statement")
_SHOWN = (*_NEEDED, "version", "environment_setup_commit", "image")


def load_rows(benchmark: str, file: Path | None) -> Sequence[Row]:
    """From the file, or from the hub by the library `datasets`. Raises ConfigError."""
    rows = list(read_rows(file)) if file is not None else _of_hub(DATASETS[benchmark])
    for row in rows:
        lacking = [column for column in _NEEDED if not isinstance(row.get(column), str)]
        if lacking:
            raise ConfigError(f"{file or benchmark}: a row has no {', '.join(lacking)}; it has {', '.join(row)}")
    if not rows:
        raise ConfigError(f"{file or benchmark} has no rows")
    return rows


def _of_hub(dataset: str) -> Sequence[Row]:
    try:
        load_dataset = importlib.import_module("datasets").load_dataset
    except ImportError as error:
        raise ConfigError(
            f"{dataset} comes from the hub by the library `datasets`: pip install datasets, or give a file with --rows"
        ) from error
    try:
        return [dict(row) for row in load_dataset(dataset, split=_SPLIT)]
    except Exception as error:  # of whichever HTTP library it uses
        raise ConfigError(f"{dataset} cannot be read from the hub ({error}); give a file with --rows") from error


def task_of(row: Row) -> Task:
    """`image`: the official one of the row, where the row names none."""
    shown = {column: row[column] for column in _SHOWN if column in row}
    image = f"swebench/sweb.eval.x86_64.{row['instance_id'].lower().replace('__', '_1776_')}:latest"
    return Task(
        id=row["instance_id"],
        input={"image": image, **shown},
        hidden={column: value for column, value in row.items() if column not in _SHOWN},
    )


def evaluation_command(benchmark: str, file: Path | None, predictions: Path, *, run_id: str) -> Sequence[str]:
    """Of the package `swebench`; it needs Docker."""
    dataset = DATASETS[benchmark] if file is None else str(file.absolute())
    words = [sys.executable, "-m", "swebench.harness.run_evaluation", "--dataset_name", dataset, "--split", _SPLIT]
    return [*words, "--predictions_path", str(predictions), "--run_id", run_id, "--report_dir", str(predictions.parent)]


async def missing() -> str | None:
    """What its evaluation would lack here; None: nothing."""
    if importlib.util.find_spec("swebench") is None:
        return "the package swebench is not installed here"
    if shutil.which("docker") is None:
        return "Docker is not installed here"
    silent = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec("docker", "info", stdin=silent, stdout=silent, stderr=silent)
    return None if await process.wait() == 0 else "Docker does not answer here (docker info)"


async def run_evaluation(command: Sequence[str], folder: Path) -> None:
    """With its logs in the folder, and what it says on stderr. Raises ConfigError when it fails."""
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=sys.stderr)
    if (code := await process.wait()) != 0:
        raise ConfigError(f"swebench's evaluation failed with exit code {code}: {shlex.join(command)}")


def read_report(folder: Path, *, model: str, run_id: str) -> Mapping[str, Any]:
    """What the evaluation wrote. Raises ConfigError."""
    path = folder / f"{model.replace('/', '__')}.{run_id}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"swebench's report {path} cannot be read: {error}") from error
