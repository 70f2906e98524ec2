"""Texts counted and cut as IFEval means it: words, sentences, capital words, language.

Where the published checks ask a library, so do we or say what is different: words are runs of letters, digits and
underscores, as theirs; sentences end at `.`, `!` or `?` before space, other than after known abbreviations (theirs are
those of nltk's trained model, which has to be downloaded); the language is langdetect's guess, as theirs, but always
the same one for a text.
"""

import re

from manege.errors import ConfigError

__all__ = ["capital_words", "is_language", "num_sentences", "num_words"]

# fmt: off
_ABBREVIATIONS = frozenset((
    "mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "inc", "ltd", "co", "corp", "no", "vol", "fig",
    "al", "approx", "dept", "est", "e.g", "i.e", "u.s", "u.k", "a.m", "p.m", "ph.d",
))
# fmt: on
_END = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s|$)")


def num_words(text: str) -> int:
    """In any script."""
    return len(re.findall(r"\w+", text))


def num_sentences(text: str) -> int:
    """A text without an end mark is one sentence.

    >>> num_sentences("Dr. Who paid 3.50 for it. Why? (He was late.) Ask e.g. Ben")
    4
    """
    num, start = 0, 0
    for end in _END.finditer(text):
        before = text[start : end.start()].split()
        if not before or _continues(before[-1], end[0], text[end.end() :]):
            continue
        num, start = num + 1, end.end()
    return num + bool(re.search(r"\w", text[start:]))


def _continues(word: str, mark: str, rest: str) -> bool:
    """Whether the full stop after a word ends no sentence."""
    word = word.lstrip("(\"'“‘[").lower()
    if mark != "." or not rest.strip():
        return False
    # A number that opens a line is that of a list; letters alone are initials.
    return word in _ABBREVIATIONS or word.isdigit() or bool(re.fullmatch(r"[b-hj-z]|[a-z](?:\.[a-z])+", word))


def capital_words(text: str) -> int:
    """Words with a letter and without a lower-case one, parts joined by `-`, `.` or `&` being one word."""
    return sum(word.isupper() for word in re.findall(r"\w+(?:[-.&]\w+)*", text))


def is_language(text: str, code: str) -> bool:
    """Whether it is the likeliest language of the text; a text that has none (digits, marks) counts as any, as
    published. Raises ConfigError where langdetect is missing."""
    try:
        import langdetect
    except ImportError as error:
        raise ConfigError(
            "the language of a text is asked of langdetect, which is not installed: pip install 'manege[general]'"
        ) from error
    langdetect.DetectorFactory.seed = 0
    try:
        return langdetect.detect(text) == code
    except langdetect.LangDetectException:
        return True
