"""The text of all passages on disk, found by number: JSON lines, and where each begins.

Both files are memory-mapped, so that what is held in memory is what was lately asked for, and the system may drop it.
"""

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import orjson

from manege.recipes.search.retrieval.corpus import Passage

__all__ = ["Passages", "write_passages"]

_TEXT, _STARTS = "passages.jsonl", "passages.starts.npy"


def write_passages(passages: Iterable[Passage], folder: Path) -> int:
    """Their number."""
    blocks, starts, end = [], [0], 0
    with (folder / _TEXT).open("wb") as file:
        for passage in passages:
            end += file.write(orjson.dumps(passage, option=orjson.OPT_APPEND_NEWLINE))
            starts.append(end)
            if len(starts) == 2**16:
                blocks.append(np.array(starts))
                starts = []
    np.save(folder / _STARTS, np.concatenate([*blocks, np.array(starts, np.int64)]))
    return sum(map(len, blocks)) + len(starts) - 1


class Passages:
    """A sequence of Passage."""

    def __init__(self, folder: Path) -> None:
        self._starts = np.load(folder / _STARTS, mmap_mode="r")
        with (folder / _TEXT).open("rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Passage:
        start, end = self._starts[number : number + 2]
        return Passage(**orjson.loads(self._text[start:end]))

    def __iter__(self) -> Iterator[Passage]:
        return map(self.__getitem__, range(len(self)))
