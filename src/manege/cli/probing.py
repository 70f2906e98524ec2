"""The probe of a curation: rollouts of each row's task, by the machinery of `manege eval`, and what came of them.

Results are appended task by task, so that what a crash leaves is kept; rollouts of tasks that were half done are found
again in the probe's own store, beside the results. A rollout that was lost to the infrastructure says nothing of its
task, and is not counted.
"""

import argparse
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import orjson
from rich.console import Console

from manege.cli.arguments import read_run
from manege.cli.evaluating import feeding
from manege.cli.parts import check_agents
from manege.config import RunConfig
from manege.curation.config import Probe
from manege.curation.rows import Row
from manege.curation.steps import row_id
from manege.errors import ConfigError
from manege.programs import import_function
from manege.trainer.repeated import Tried, repeated, tried
from manege.types import Task

__all__ = ["probe_rows"]

_NEWS = 50
"""Tasks between two lines of progress."""


async def probe_rows(
    step: Probe,
    rows: Callable[[], Iterable[Row]],
    results: Path,
    *,
    base: Path,
    id_column: str,
    unsafe: bool,
    console: Console,
) -> None:
    """See `curation.pipeline.Prober`."""
    assert step.run is not None
    known = _known(results)
    make = _from_row if step.task is None else import_function(step.task, what="task of the probe")
    digests: dict[str, str] = {}

    def tasks() -> Iterator[Task]:
        for row in rows():
            task_id, digest = row_id(row, id_column), _digest(row)
            if known.get(task_id) == digest:
                continue
            task = make(row)
            if task.id != task_id:
                raise ConfigError(f"task of the probe: row {task_id!r} became task {task.id!r}; ids must stay")
            digests[task_id] = digest
            yield task

    first = next(tasks(), None)
    if first is None:
        return
    config = _config(step, base, results.parent, unsafe)
    check_agents(config, [first], console)
    num_rows = sum(1 for _ in rows())
    with results.open("ab") as file:
        async with feeding(config) as (_, _, feed):
            groups = repeated(
                feed,
                tasks(),
                name="probe",
                size=step.rollouts,
                temperature=step.temperature,
                slots=config.controller.slots,
            )
            async for group in groups:
                found = tried(group, success_reward=config.scorer.success_reward)
                digest = digests.pop(found.task.id)
                file.write(orjson.dumps(_result(found, digest), option=orjson.OPT_APPEND_NEWLINE))
                file.flush()
                known[found.task.id] = digest
                if len(known) % _NEWS == 0:
                    console.print(f"probe: {len(known):,} of {num_rows:,} tasks", highlight=False)


def _config(step: Probe, base: Path, folder: Path, unsafe: bool) -> RunConfig:
    """The run file's, in a folder of the probe's own."""
    assert step.run is not None
    overrides = [*step.overrides, f"folder={folder}"]
    return read_run(argparse.Namespace(run_file=base / step.run, overrides=overrides, unsafe=unsafe, quick=False))


def _known(results: Path) -> dict[str, str]:
    """Task ids with the digests of their rows; what a crash left half is cut off."""
    if not results.exists():
        return {}
    whole = [line for line in results.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    results.write_bytes(b"".join(whole))
    return {row["id"]: row["row"] for row in map(orjson.loads, whole)}


def _result(found: Tried, digest: str) -> Mapping[str, object]:
    return {
        "id": found.task.id,
        "row": digest,
        "rollouts": found.num_rollouts - found.num_lost,
        "successes": found.num_success,
        "rewards": found.rewards,
        "turns": found.num_calls,
        "prompt_tokens": found.num_prompt_tokens,
        "sampled_tokens": found.num_sampled_tokens,
        "seconds": round(found.seconds, 2),
    }


def _from_row(row: Row) -> Task:
    """A row in the form of a task file."""
    if not isinstance(row.get("id"), str) or not isinstance(row.get("input"), dict):
        raise ConfigError(
            f"a row is no task (`id`, `input`, `hidden`): it has {', '.join(row)}; name the function that makes one "
            "with `task` of the probe"
        )
    return Task(id=row["id"], input=row["input"], hidden=row.get("hidden") or {})


def _digest(row: Row) -> str:
    return hashlib.blake2b(orjson.dumps(row, option=orjson.OPT_SORT_KEYS), digest_size=12).hexdigest()
