"""Text to the words that BM25 counts: lower case, without English stop words, cut to their stems (Snowball)."""

import re
from collections.abc import Iterator

import Stemmer
from bm25s.stopwords import STOPWORDS_EN

__all__ = ["Stems", "words_of"]

_WORD = re.compile(r"\w+")


class Stems(dict[str, str]):
    """The stem of each word that was asked for; empty for stop words. It grows, and is for one build or one query."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(STOPWORDS_EN, ""))
        self._stemmer = Stemmer.Stemmer("english")

    def __missing__(self, word: str) -> str:
        stem = self[word] = self._stemmer.stemWord(word)
        return stem


def words_of(text: str, stems: Stems) -> Iterator[str]:
    """In their order, as often as they stand there."""
    return filter(None, map(stems.__getitem__, _WORD.findall(text.lower())))
