"""Text to the words that BM25 counts: lower case, without English stop words, cut to their stems (Snowball)."""

import re

import Stemmer
from bm25s.stopwords import STOPWORDS_EN

__all__ = ["Stems", "raw_words", "words_of"]

_WORD = re.compile(r"\w+")


class Stems:
    """Stems of words in lower case."""

    def __init__(self) -> None:
        self._stemmer = Stemmer.Stemmer("english")
        self._without = frozenset(STOPWORDS_EN)

    def of(self, word: str) -> str:
        """Empty for a stop word."""
        return "" if word in self._without else self._stemmer.stemWord(word)


def raw_words(text: str) -> list[str]:
    """In lower case, stop words among them."""
    return _WORD.findall(text.lower())


def words_of(text: str) -> list[str]:
    """In their order, as often as they stand there."""
    stems = Stems()
    return [stem for word in raw_words(text) if (stem := stems.of(word))]
