"""An export as JSON lines: the head, then one rollout per line with its calls and events.

Numbers are exact: a log-probability is written as the shortest decimal of its float64, one that is not finite as the
string `nan`, `inf` or `-inf`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from manege.errors import StoreError
from manege.store.base import Run
from manege.store.codec import ROLLOUT, call_record, make_call
from manege.store.exports.base import ARRAYS, Export, ExportedRollout, check_head, head
from manege.types import Call, Event, FloatArray, Rollout

__all__ = ["JsonlWriter", "read_jsonl"]

_ROLLOUT = [each.name for each in fields(Rollout)]


class JsonlWriter:
    """Writes a line per rollout as it comes."""

    def __init__(self, path: Path, run: Run | None) -> None:
        self._file = path.open("wb")
        self._write(head(run))

    def add(self, exported: ExportedRollout) -> None:
        """One line."""
        fields_ = {name: getattr(exported.rollout, name) for name in _ROLLOUT}
        self._write({**fields_, "calls": [_call(call) for call in exported.calls], "events": exported.events})

    def close(self) -> None:
        """The file is whole."""
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))


def read_jsonl(path: Path) -> Export:
    """Raises StoreError for a file that is no such export."""
    with path.open("rb") as file:
        return Export(run=check_head(_parsed(file.readline(), path, 1), str(path)), rollouts=_rollouts(path))


def _rollouts(path: Path) -> Iterator[ExportedRollout]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                continue
            found = _parsed(line, path, number)
            try:
                calls, events = found.pop("calls"), found.pop("events")
                yield ExportedRollout(
                    rollout=ROLLOUT.validate_python(found),
                    calls=[_read_call(call) for call in calls],
                    events=[Event(**event) for event in events],
                )
            except (KeyError, TypeError, ValueError) as error:
                raise StoreError(f"{path}, line {number}: this is no exported rollout ({error})") from error


def _parsed(line: bytes, path: Path, number: int) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise StoreError(f"{path}, line {number}: {error}; the file is cut or damaged, export it again") from error


def _call(call: Call) -> Mapping[str, Any]:
    arrays: dict[str, Any] = {name: getattr(call, field) for name, field in ARRAYS.items()}
    return {**call_record(call), **arrays, "logprobs": _numbers(call.logprobs_R)}


def _numbers(logprobs_R: FloatArray) -> Any:
    values_R = logprobs_R.astype(np.float64)
    if np.isfinite(values_R).all():
        return values_R
    return [value if np.isfinite(value) else str(value) for value in values_R.tolist()]


def _read_call(found: dict[str, Any]) -> Call:
    logprobs_R = np.array([float(value) for value in found.pop("logprobs")], np.float32)
    ids = {ARRAYS[name]: np.array(found.pop(name), np.int32) for name in ("prompt_ids", "response_ids")}
    return make_call(found, **ids, logprobs_R=logprobs_R)
