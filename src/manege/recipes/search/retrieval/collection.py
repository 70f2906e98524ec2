"""A corpus that can be searched: its passages and an index of them, from the cache or built now."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from manege.engine.threads import calm_threads
from manege.errors import ConfigError
from manege.logs import get_logger, kv
from manege.recipes.search.retrieval.cache import built_once, fingerprint
from manege.recipes.search.retrieval.corpus import Passage, corpus_files, corpus_name, read_passages
from manege.recipes.search.retrieval.encoder import encoder_folder
from manege.recipes.search.retrieval.passages import Passages, write_passages

__all__ = ["Collection", "Index", "Kind", "open_collection"]

_FORMAT = "1"
"""Counted up when what is written changes, so that an old index is not used."""
_log = get_logger("retrieval")


class Kind(StrEnum):
    """Ways of search."""

    BM25 = "bm25"
    DENSE = "dense"


class Index(Protocol):
    """Ranks passages; called by several threads at once."""

    def __init__(self, folder: Path, encoder: Path | None) -> None:
        """Open what `build` has written."""
        ...

    @classmethod
    def build(cls, passages: Passages, folder: Path, encoder: Path | None) -> None:
        """Write an index into a folder; `encoder` is None for BM25. Raises ConfigError."""
        ...

    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
        """For each query, at most `top_k` numbers of passages and their scores, the best first."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """Passages, their index, and what they are called."""

    name: str
    kind: Kind
    fingerprint: str
    passages: Passages
    index: Index

    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[Passage, float]]]:
        """For each query, at most `top_k` passages and their scores, the best first; none for a blank one."""
        asked = [number for number, query in enumerate(queries) if query.strip()]
        found = self.index.search([queries[number] for number in asked], top_k) if asked else []
        rankings = dict(zip(asked, found, strict=True))
        return [
            [(self.passages[place], score) for place, score in rankings.get(number, ())]
            for number in range(len(queries))
        ]


def open_collection(corpus: Path, kind: Kind, index_folder: Path, encoder: str) -> Collection:
    """Build the index unless it is there, and open it. Raises ConfigError."""
    model = encoder_folder(encoder) if kind is Kind.DENSE else None
    index_class = _index_class(kind)
    facts = [_FORMAT, kind, *(f"{name} {version(name)}" for name in ("bm25s", "PyStemmer") if kind is Kind.BM25)]
    files = corpus_files(corpus) + (sorted(filter(Path.is_file, model.rglob("*"))) if model else [])
    name, print_ = corpus_name(corpus), fingerprint(files, *facts)
    folder = index_folder / f"{name}-{kind}-{print_}"

    def build(aside: Path) -> None:
        started_s = time.monotonic()
        _log.info(kv("building", index=folder))
        if not write_passages(read_passages(corpus), aside):
            raise ConfigError(f"corpus {corpus} has no passages")
        passages = Passages(aside)
        _log.info(kv("read", passages=len(passages), seconds=round(time.monotonic() - started_s)))
        index_class.build(passages, aside, model)
        _log.info(kv("built", index=folder, seconds=round(time.monotonic() - started_s)))

    built_once(folder, build)
    return Collection(
        name=name, kind=kind, fingerprint=print_, passages=Passages(folder), index=index_class(folder, model)
    )


def _index_class(kind: Kind) -> type[Index]:
    try:
        if kind is Kind.BM25:
            from manege.recipes.search.retrieval.bm25 import BM25Index

            return BM25Index
        # Before FAISS and torch come with their OpenMP.
        calm_threads()
        from manege.recipes.search.retrieval.dense import DenseIndex

        return DenseIndex
    except ImportError as error:
        extras = "search" if kind is Kind.BM25 else "search,train,transformers"
        raise ConfigError(f"{kind} search needs {error.name}: pip install 'manege[{extras}]'") from error
