"""Dense search: the cosine between the vectors of query and passage, exact, by FAISS over vectors that lie on disk."""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import faiss
import numpy as np
from numpy.lib.format import open_memmap

from manege.logs import get_logger, kv
from manege.recipes.search.retrieval.encoder import Encoder
from manege.recipes.search.retrieval.passages import Passages

__all__ = ["DenseIndex"]

_VECTORS = "vectors.npy"
_CHUNK = 4096
_log = get_logger("retrieval")


class DenseIndex:
    """Implements Index."""

    def __init__(self, folder: Path, encoder: Path | None) -> None:
        """Raises ConfigError."""
        assert encoder is not None
        self._encoder = Encoder(encoder)
        self._vectors = np.asarray(np.load(folder / _VECTORS, mmap_mode="r"))
        # One search at a time uses all cores; several would only take them from each other.
        self._lock = Lock()

    @classmethod
    def build(cls, passages: Passages, folder: Path, encoder: Path | None) -> None:
        """See Index."""
        assert encoder is not None
        model, num = Encoder(encoder), len(passages)
        vectors = open_memmap(folder / _VECTORS, "w+", np.dtype(np.float32), (num, model.size))
        for start in range(0, num, _CHUNK):
            chunk = range(start, min(start + _CHUNK, num))
            vectors[start : chunk.stop] = model.passages([passages[number].searched for number in chunk])
            _log.info(kv("encoded", passages=chunk.stop, of=num))

    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
        """See Index."""
        top_k = min(top_k, len(self._vectors))
        with self._lock:
            vectors = self._encoder.queries(queries)
            scores, numbers = faiss.knn(vectors, self._vectors, top_k, metric=faiss.METRIC_INNER_PRODUCT)
        return [
            list(zip(row_numbers, row_scores, strict=True))
            for row_numbers, row_scores in zip(numbers.tolist(), scores.tolist(), strict=True)
        ]
