"""verl's dataset rows and our tasks.

A row may carry a whole task, as JSON text of `{"id": ..., "input": {...}, "hidden": {...}}`, in `extra_info.task`:

    python -m manege.verl.dataset run.toml FOLDER

writes the tasks of a run file so, as FOLDER/train.parquet and FOLDER/val.parquet. Any other row of verl's becomes a
task by itself: the text of its last user message is `prompt` in the task's input, with the scalars of `extra_info`
beside it; the ground truth and the data source are hidden fields `ground_truth` and `data_source`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manege.cli.arguments import read_run
from manege.errors import ConfigError
from manege.trainer.tasks import load_train_and_heldout
from manege.types import JsonObject, Task

__all__ = ["dataset_row", "row_task", "write_dataset"]


def row_task(row: Mapping[str, Any]) -> Task:
    """Of a row as verl's dataset gives it. Raises ConfigError for a task that is none."""
    extra = dict(row.get("extra_info") or {})
    if (text := extra.get("task")) is not None:
        return _whole(text)
    messages = row.get("raw_prompt") or ()
    said = [message["content"] for message in messages if message.get("role") == "user"]
    scalars = {key: value for key, value in extra.items() if isinstance(value, str | int | float | bool)}
    source, truth = row.get("data_source"), (row.get("reward_model") or {}).get("ground_truth")
    return Task(
        id=f"{source or 'verl'}-{extra.get('index', row.get('index', 0))}",
        input={**scalars, "prompt": _text(said[-1]) if said else ""},
        hidden={"ground_truth": truth, "data_source": source},
    )


def dataset_row(task: Task, *, source: str, index: int) -> JsonObject:
    """The row of a task. verl's prompt is for its logs only: what the agent says to the model is the agent's."""
    whole = {"id": task.id, "input": dict(task.input), "hidden": dict(task.hidden)}
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"task {task.id}"}],
        "reward_model": {"style": "manege", "ground_truth": ""},
        "extra_info": {"index": index, "task": json.dumps(whole)},
    }


def write_dataset(tasks: Sequence[Task], path: Path, *, source: str) -> None:
    """A Parquet file that verl reads as data.train_files or data.val_files."""
    import pyarrow as arrow
    from pyarrow import parquet

    rows = [dataset_row(task, source=source, index=index) for index, task in enumerate(tasks)]
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(rows), path)


def _whole(text: Any) -> Task:
    try:
        value = json.loads(text) if isinstance(text, str) else dict(text)
        return Task(id=str(value["id"]), input=dict(value["input"]), hidden=dict(value.get("hidden") or {}))
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"extra_info.task = {str(text)[:80]!r} is no task ({error!r}): want JSON text of "
            '{"id": "...", "input": {...}, "hidden": {...}}, as `python -m manege.verl.dataset` writes it'
        ) from error


def _text(content: Any) -> str:
    """Of a message whose content is text or a list of parts."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m manege.verl.dataset", description="Tasks of a run file for verl")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("folder", type=Path, help="where train.parquet and val.parquet go")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    config = read_run(argparse.Namespace(**vars(arguments), quick=False, unsafe=False))
    train, heldout = load_train_and_heldout(config.tasks, seed=config.seed)
    write_dataset(train, arguments.folder / "train.parquet", source=config.name)
    write_dataset(heldout or train[:1], arguments.folder / "val.parquet", source=config.name)


if __name__ == "__main__":
    main()
