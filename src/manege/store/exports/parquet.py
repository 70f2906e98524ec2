"""An export as Parquet: a row per call with the columns of its rollout; a rollout without calls is one row, whose call
columns are null.

What is nested is JSON text, and so are events, which stand in the first row of their rollout. The file's metadata has
the head, with the run's config, under `manege`. pyarrow is an optional dependency.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from manege.errors import ConfigError, StoreError
from manege.store.base import Run
from manege.store.codec import ROLLOUT, call_record, dumps, make_call
from manege.store.exports.base import ARRAYS, Export, ExportedRollout, check_head, head
from manege.types import Call, Event, Rollout

__all__ = ["ParquetWriter", "read_parquet"]

_KEY = b"manege"
_GROUP_BYTES = 32 * 2**20
"""Of rows before they are written: bounds memory, and is enough for a row group to be read fast."""
_ROWS = 64
"""Read at once."""

_OF_ROLLOUT: Mapping[str, Sequence[str]] = {
    "string": ("run", "rollout_id", "group_id", "task_id", "state", "outcome", "message", "reward_from"),
    "bool": ("is_train",),
    "double": ("reward", "rollout_created_s", "rollout_started_s", "rollout_ended_s", "rollout_temperature"),
    "int32": ("attempt", "max_attempts"),
    "int64": ("completion",),
    "json": ("task", "hidden", "metadata", "evidence"),
}
_OF_CALL: Mapping[str, Sequence[str]] = {
    "string": (
        "call_id",
        "parent",
        "thread",
        "protocol",
        "mode",
        "finish_reason",
        "delivered",
        "flaw",
        "routed_experts",
    ),
    "bool": ("constrained",),
    "double": ("temperature", "created_s", "ended_s"),
    "ids": ("prompt_ids", "response_ids"),
    "logprobs": ("logprobs",),
    "spans": ("spans",),
    "json": ("messages", "request", "reply", "overridden", "headers", "edits"),
}
_CALL_FIELDS = [name for names in _OF_CALL.values() for name in names if name not in ARRAYS]
_COLUMNS: Mapping[str, str] = {
    name: kind
    for columns in (_OF_ROLLOUT, {"json": ["events"]}, _OF_CALL)
    for kind, names in columns.items()
    for name in names
}


class ParquetWriter:
    """Writes row groups of whole rollouts."""

    def __init__(self, path: Path, run: Run | None) -> None:
        pa, pq = _arrow()
        types = {
            "json": pa.string(),
            "ids": pa.list_(pa.int32()),
            "logprobs": pa.list_(pa.float32()),
            "spans": pa.list_(pa.struct({"first_token": pa.int32(), "version": pa.int64()})),
        }
        columns = [(name, types.get(kind) or pa.type_for_alias(kind)) for name, kind in _COLUMNS.items()]
        self._schema = pa.schema(columns, metadata={_KEY: dumps(head(run))})
        self._new_table = pa.Table.from_pylist
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[Mapping[str, Any]] = []
        self._num_bytes = 0

    def add(self, exported: ExportedRollout) -> None:
        """Its rows, with the next row group."""
        shared = _rollout_row(exported.rollout)
        rows = [{**shared, **_call_row(call)} for call in exported.calls] or [shared]
        rows[0]["events"] = dumps([_event(event) for event in exported.events])
        self._rows += rows
        self._num_bytes += sum(_size(value) for row in rows for value in row.values())
        if self._num_bytes >= _GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """The file is whole."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._new_table(self._rows, self._schema))
        self._rows, self._num_bytes = [], 0


def read_parquet(path: Path) -> Export:
    """Raises StoreError for a file that is no such export."""
    pa, pq = _arrow()
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path} cannot be read as Parquet: {error}") from error
    found = (file.schema_arrow.metadata or {}).get(_KEY, b"null")
    run = check_head(orjson.loads(found), str(path))
    if missing := [name for name in _COLUMNS if name not in file.schema_arrow.names]:
        file.close()
        raise StoreError(f"{path} lacks the columns {', '.join(missing)}; export the run again")
    return Export(run=run, rollouts=_guarded(_rollouts(file), pa.ArrowException, path))


def _guarded(rollouts: Iterator[ExportedRollout], damage: type[Exception], path: Path) -> Iterator[ExportedRollout]:
    try:
        yield from rollouts
    except (damage, OSError) as error:
        raise StoreError(f"{path} is damaged: {error}; export it again") from error


def _rollouts(file: Any) -> Iterator[ExportedRollout]:
    with file:
        for _, rows in groupby(_rows(file), key=lambda row: row["rollout_id"]):
            first = next(rows)
            calls = [_call(row) for row in (first, *rows) if row["call_id"] is not None]
            rollout = _rollout(first)
            events = [Event(rollout_id=rollout.spec.id, **event) for event in orjson.loads(first["events"])]
            yield ExportedRollout(rollout=rollout, calls=calls, events=events)


def _rows(file: Any) -> Iterator[dict[str, Any]]:
    """Arrays as numpy's, JSON as it is."""
    for batch in file.iter_batches(_ROWS, columns=list(_COLUMNS)):
        columns = {name: [_array(each) for each in batch.column(name)] for name in ARRAYS}
        for number, row in enumerate(batch.drop_columns(list(ARRAYS)).to_pylist()):
            yield {**row, **{name: values[number] for name, values in columns.items()}}


def _array(value: Any) -> Any:
    return value.values.to_numpy(zero_copy_only=False) if value.is_valid else None


def _rollout_row(rollout: Rollout) -> dict[str, Any]:
    spec, task = rollout.spec, rollout.spec.task
    return {
        **{name: getattr(rollout, name) for name in ("state", "outcome", "reward", "message", "attempt", "completion")},
        **{name: getattr(spec, name) for name in ("run", "is_train", "reward_from", "max_attempts")},
        **{f"rollout_{name}": getattr(rollout, name) for name in ("created_s", "started_s", "ended_s")},
        "rollout_id": spec.id,
        "group_id": spec.group,
        "rollout_temperature": spec.temperature,
        "task_id": task.id,
        "task": dumps(task.input),
        "hidden": dumps(task.hidden),
        "metadata": dumps(spec.metadata),
        "evidence": dumps(rollout.evidence),
    }


def _rollout(row: Mapping[str, Any]) -> Rollout:
    task = {"id": row["task_id"], "input": orjson.loads(row["task"]), "hidden": orjson.loads(row["hidden"])}
    spec = {
        **{name: row[name] for name in ("run", "is_train", "reward_from", "max_attempts")},
        "id": row["rollout_id"],
        "group": row["group_id"],
        "temperature": row["rollout_temperature"],
        "task": task,
        "metadata": orjson.loads(row["metadata"]),
    }
    return ROLLOUT.validate_python(
        {
            **{name: row[name] for name in ("state", "outcome", "reward", "message", "attempt", "completion")},
            **{name: row[f"rollout_{name}"] for name in ("created_s", "started_s", "ended_s")},
            "spec": spec,
            "evidence": orjson.loads(row["evidence"]),
        }
    )


def _call_row(call: Call) -> dict[str, Any]:
    """`messages` apart from the rest of the request: they are what most readers want."""
    record = call_record(call) | {"call_id": call.id, "spans": [asdict(span) for span in call.spans]}
    record["request"] = {name: value for name, value in call.request.items() if name != "messages"}
    record["messages"] = call.request.get("messages")
    row = {name: record[name] for name in _CALL_FIELDS}
    row |= {name: dumps(row[name]) for name in _OF_CALL["json"] if row[name] is not None}
    return row | {name: getattr(call, field) for name, field in ARRAYS.items()}


def _call(row: Mapping[str, Any]) -> Call:
    record = {name: row[name] for name in _CALL_FIELDS}
    record |= {name: orjson.loads(row[name]) for name in _OF_CALL["json"] if row[name] is not None}
    messages = record.pop("messages")
    if messages is not None:
        record["request"]["messages"] = messages
    record |= {"id": record.pop("call_id"), "rollout_id": row["rollout_id"], "attempt": row["attempt"]}
    return make_call(record, **{field: row[name] for name, field in ARRAYS.items()})


def _event(event: Event) -> Mapping[str, Any]:
    return {name: getattr(event, name) for name in ("attempt", "event_type", "data", "timestamp_s")}


def _size(value: Any) -> int:
    return getattr(value, "nbytes", len(value) if isinstance(value, str) else 8)


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install 'manege[export]'; jsonl needs nothing") from error
    return pyarrow, pyarrow.parquet
