"""Corpora as they come: JSON lines or Parquet, one file or a folder of them, plain or packed, to passages.

A record has `text`, or `contents` (title, newline, text, as Pyserini and FlashRAG write it), and perhaps `title` and
`id` (`_id` in BEIR); whatever else it has is left out. A passage without an id has its number in the corpus. What
cannot be read is named by file and line.
"""

import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import orjson
import zstandard

from manege.errors import ConfigError

__all__ = ["Passage", "corpus_files", "corpus_name", "read_passages"]

LINES = (".jsonl", ".ndjson")
PACKED = (".gz", ".zst")
KINDS = (*LINES, *(line + packed for line in LINES for packed in PACKED), ".parquet")
COLUMNS = ("id", "_id", "title", "text", "contents")


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """What is found and given to the agent."""

    id: str
    title: str
    """Empty if it has none."""
    text: str

    @property
    def searched(self) -> str:
        """What an index is made of."""
        return f"{self.title}\n{self.text}"


def corpus_name(corpus: Path) -> str:
    """The file's name without its kind, or the folder's."""
    name = corpus.resolve().name
    kinds = sorted((kind for kind in KINDS if name.endswith(kind)), key=len)
    return name.removesuffix(kinds[-1]) if kinds and corpus.is_file() else name


def corpus_files(corpus: Path) -> list[Path]:
    """The files of a corpus in the order of their names. Raises ConfigError when there are none."""
    if corpus.is_file():
        if not corpus.name.endswith(KINDS):
            raise ConfigError(f"corpus {corpus} is of no known kind; want a file that ends in {', '.join(KINDS)}")
        return [corpus]
    if not corpus.is_dir():
        raise ConfigError(f"corpus {corpus} does not exist; name a file, or a folder of files")
    files = sorted(path for path in corpus.iterdir() if path.name.endswith(KINDS) and not path.name.startswith("."))
    if not files:
        raise ConfigError(f"corpus folder {corpus} has no file that ends in {', '.join(KINDS)}")
    return files


def read_passages(corpus: Path) -> Iterator[Passage]:
    """All passages, one at a time. Raises ConfigError."""
    number = 0
    for path in corpus_files(corpus):
        for where, record in _rows(path) if path.suffix == ".parquet" else _lines(path):
            yield _passage(record, where, number)
            number += 1


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(_unpacked_lines(file) if path.suffix == ".zst" else file, 1):
                if line.strip():
                    yield f"{path}:{number}", orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}:{number} is not valid JSON: {error}") from error
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise ConfigError(f"{path} cannot be read after line {number}: {error}; write the file anew") from error


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _unpacked_lines(file: IO[bytes]) -> Iterator[bytes]:
    pending = b""
    for part in _unpacked(file):
        *lines, pending = (pending + part).split(b"\n")
        yield from lines
    yield pending


def _unpacked(file: IO[bytes]) -> Iterator[bytes]:
    """Frame by frame: the library's own reader takes a frame that is cut off for a whole one."""
    unpacker = None
    while part := file.read(2**20):
        while part:
            unpacker = unpacker or zstandard.ZstdDecompressor().decompressobj()
            yield unpacker.decompress(part)
            part = unpacker.unused_data
            if unpacker.eof:
                unpacker = None
    if unpacker:
        raise EOFError("it ends in the middle of a frame")


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow to be read: pip install 'manege[search]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            known = [name for name in COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=1024, columns=known):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", record
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read after row {number}: {error}; write the file anew") from error


def _passage(record: Any, where: str, number: int) -> Passage:
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where} is {_short(record)}; want an object with text or contents")
    title, text = _string(record, "title", where), _string(record, "text", where)
    if text is None:
        contents = _string(record, "contents", where)
        if contents is None:
            raise ConfigError(f"{where} has neither text nor contents, but {', '.join(record) or 'nothing'}")
        head, newline, rest = contents.partition("\n")
        # FlashRAG writes titles in quotes.
        head = head.strip().strip('"')
        if title is None and newline:
            title, text = head, rest
        else:
            text = rest if newline and head == title else contents
    number_or_id = next((record[key] for key in ("id", "_id") if record.get(key) is not None), number)
    return Passage(id=str(number_or_id), title=title or "", text=text)


def _string(record: Mapping[str, Any], key: str, where: str) -> str | None:
    value = record.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: {key} is {_short(value)}; want a string")
    return value


def _short(value: Any) -> str:
    return f"{value!r:.60}"
