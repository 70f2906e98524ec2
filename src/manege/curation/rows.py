"""Rows of a table, one after the other: JSON lines (also packed with zstd) and Parquet.

A table of tens of thousands of rows with long patches and lists of tests is larger than memory, so nothing here holds
more than some rows at once. What is written appears when it is whole.
"""

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any

import orjson
import zstandard

from manege.errors import ConfigError

__all__ = ["Row", "read_rows", "write_rows"]

Row = Mapping[str, Any]
_BATCH = 64
"""Rows of Parquet in memory at once."""


def read_rows(path: Path) -> Iterator[Row]:
    """By the name's ending: .parquet, .jsonl or .jsonl.zst. Raises ConfigError that names file and line."""
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file, path), start=1):
                if line.strip():
                    yield _parsed(line, path, number)
    except (OSError, zstandard.ZstdError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """By the name's ending, as `read_rows`; returns how many. It replaces a file at once, and survives a power cut."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        num_rows = (_write_parquet if path.suffix == ".parquet" else _write_lines)(partial, rows)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    return num_rows


def _lines(file: IO[bytes], path: Path) -> Iterable[bytes]:
    if path.suffix != ".zst":
        return file
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))


def _parsed(line: bytes, path: Path, number: int) -> Row:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {number}: not JSON ({error}): {line[:80]!r}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{path}, line {number}: want an object with a value per column, got {line[:80]!r}")
    return row


def _write_lines(path: Path, rows: Iterable[Row]) -> int:
    num_rows = 0
    with path.open("wb") as file:
        packed = path.suffix == ".zst"
        sink = zstandard.ZstdCompressor().stream_writer(file, closefd=False) if packed else file
        for row in rows:
            sink.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            num_rows += 1
        if sink is not file:
            sink.close()
    return num_rows


def _read_parquet(path: Path) -> Iterator[Row]:
    pa, pq = _arrow()
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error


def _write_parquet(path: Path, rows: Iterable[Row]) -> int:
    """A table has one type per column, and rows are read only once: so they pass through a file of lines."""
    pa, pq = _arrow()
    lines = path.with_name(f"{path.name}.jsonl.zst")
    try:
        num_rows = _write_lines(lines, rows)
        schemas = (pa.Table.from_pylist(some).schema for some in _some(read_rows(lines)))
        schema = pa.unify_schemas(list(schemas), promote_options="permissive") if num_rows else pa.schema([])
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for some in _some(read_rows(lines)):
                writer.write_table(pa.Table.from_pylist(some, schema))
    except pa.ArrowException as error:
        raise ConfigError(f"{path} cannot be written as Parquet, JSON lines can: {error}") from error
    finally:
        lines.unlink(missing_ok=True)
    return num_rows


def _some(rows: Iterator[Row]) -> Iterator[list[Row]]:
    return iter(lambda: list(islice(rows, _BATCH)), [])


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install 'manege[export]'; JSON lines need nothing") from error
    return pyarrow, pyarrow.parquet
