"""BM25: the index is a folder of the library bm25s, which also scores; built here, since the library's own build holds
the whole corpus as Python lists.

Building reads the passages once. Blocks of passages are counted and written as (word, passage, count), sorted; then
the number of passages with each word is known for the whole corpus, each word gets its place in the index, and the
blocks are put there one after the other. Memory: the vocabulary and one block.

    score = sum over words w of the query:
        ln(1 + (N - n_w + 0.5) / (n_w + 0.5)) * f / (f + k1 * (1 - b + b * L / mean L))

with f times w in a passage of L words, n_w passages of N with w: Lucene's variant (https://arxiv.org/abs/2407.03618).

Shapes: P postings (pairs of a word and a passage that has it), N passages, V words.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import bm25s
import numpy as np
import numpy.typing as npt
import orjson
from numpy.lib.format import open_memmap

from manege.recipes.search.retrieval.corpus import Passage
from manege.recipes.search.retrieval.words import Stems, raw_words, words_of

__all__ = ["K1", "B", "BM25Index"]

K1, B = 0.9, 0.4
"""Of Anserini and of the BM25 in https://arxiv.org/abs/2004.04906, for passages of about 100 words."""
BLOCK_WORDS = 4_000_000
"""Sorting takes some arrays of eight bytes a word."""


class BM25Index:
    """Implements Index."""

    def __init__(self, folder: Path, encoder: Path | None = None) -> None:
        self._bm25 = bm25s.BM25.load(folder, mmap=True)

    @classmethod
    def build(
        cls, passages: Iterable[Passage], folder: Path, encoder: Path | None = None, *, block_words: int = BLOCK_WORDS
    ) -> None:
        """See Index."""
        counts = _Counts(folder, block_words)
        for passage in passages:
            counts.add(passage.searched)
        counts.write_block()
        counts.write_index()

    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
        """See Index. Passages with none of a query's words are not found; of equal ones the first comes first."""
        return [self._search(query, top_k) for query in queries]

    def _search(self, query: str, top_k: int) -> list[tuple[int, float]]:
        ids = self._bm25.get_tokens_ids(words_of(query))
        if not ids:
            return []
        scores_N = self._bm25.get_scores_from_ids(ids)
        found = np.flatnonzero(scores_N)
        if len(found) > top_k:
            scores = scores_N[found]
            found = found[scores >= np.partition(scores, -top_k)[-top_k]]
        best = found[np.argsort(-scores_N[found], kind="stable")][:top_k]
        return [(int(number), float(scores_N[number])) for number in best]


class _Ids(dict[str, int]):
    """The number of each word's stem, in the order in which they came; -1 for stop words."""

    def __init__(self) -> None:
        super().__init__()
        self.of_stems: dict[str, int] = {}
        self._stems = Stems()

    def __missing__(self, word: str) -> int:
        stem = self._stems.of(word)
        number = self[word] = self.of_stems.setdefault(stem, len(self.of_stems)) if stem else -1
        return number


class _Counts:
    """Of all passages that were added."""

    def __init__(self, folder: Path, block_words: int) -> None:
        self._folder, self._block_words = folder, block_words
        self._ids = _Ids()
        self._block, self._ends = array("i"), array("i")
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._num_passages = 0

    def add(self, text: str) -> None:
        self._block.extend(map(self._ids.__getitem__, raw_words(text)))
        self._ends.append(len(self._block))
        if len(self._block) >= self._block_words:
            self.write_block()

    def write_block(self) -> None:
        ids, num = np.asarray(self._block, np.int64), len(self._ends)
        passages = np.repeat(np.arange(num), np.diff(np.asarray(self._ends), prepend=0))[ids >= 0]
        self._lengths.append(np.bincount(passages, minlength=num))
        pairs_P, counts_P = np.unique(ids[ids >= 0] << 32 | passages, return_counts=True)
        passages_P = (pairs_P & (2**32 - 1)) + self._num_passages
        np.save(
            self._block_path(len(self._lengths) - 1), np.stack([pairs_P >> 32, passages_P, counts_P]).astype(np.int32)
        )
        self._num_passages += num
        self._block, self._ends = array("i"), array("i")

    def write_index(self) -> None:
        """In the format of bm25s: for word w, the passages and scores in indptr[w]:indptr[w + 1]."""
        num_with_V = np.zeros(len(self._ids.of_stems), np.int64)
        for words_P, _, _ in self._blocks():
            num_with_V += np.bincount(words_P, minlength=len(num_with_V))
        indptr = np.concatenate([[0], np.cumsum(num_with_V)])
        lengths_N = np.concatenate(self._lengths)
        num, mean = len(lengths_N), lengths_N.mean() or 1.0
        idf_V = np.log1p((num - num_with_V + 0.5) / (num_with_V + 0.5))
        norm_N = K1 * (1 - B + B * lengths_N / mean)
        shape = (int(indptr[-1]),)
        indices_P = open_memmap(self._folder / "indices.csc.index.npy", "w+", np.dtype(np.int32), shape)
        data_P = open_memmap(self._folder / "data.csc.index.npy", "w+", np.dtype(np.float32), shape)
        next_V = indptr[:-1].copy()
        for words_P, passages_P, counts_P in self._blocks():
            # A block is sorted by word and then by passage: a posting's place is the word's next one, plus its place
            # among the block's postings of that word.
            block_V = np.bincount(words_P, minlength=len(next_V))
            place_P = (next_V - (np.cumsum(block_V) - block_V))[words_P] + np.arange(len(words_P))
            indices_P[place_P] = passages_P
            data_P[place_P] = idf_V[words_P] * counts_P / (counts_P + norm_N[passages_P])
            next_V += block_V
        np.save(self._folder / "indptr.csc.index.npy", indptr)
        for number in range(len(self._lengths)):
            self._block_path(number).unlink()
        (self._folder / "vocab.index.json").write_bytes(orjson.dumps(self._ids.of_stems))
        retriever = bm25s.BM25(k1=K1, b=B, method="lucene")
        names = ("k1", "b", "delta", "method", "idf_method", "dtype", "int_dtype", "backend")
        params = {name: getattr(retriever, name) for name in names}
        params |= {"num_docs": num, "version": bm25s.__version__}
        (self._folder / "params.index.json").write_text(json.dumps(params))

    def _blocks(self) -> Iterator[npt.NDArray[np.int32]]:
        return (np.load(self._block_path(number)) for number in range(len(self._lengths)))

    def _block_path(self, number: int) -> Path:
        return self._folder / f"postings-{number}.npy"
