"""What an agent is evaluated on, as a training table may have it under another name.

Repositories are written in many ways. These are one: `pallets/flask`, `pallets__flask`, a mirror with its commit as
`swesmith/pallets__flask.bc098406`, `https://github.com/pallets/flask.git`; a bare `flask` is any of that name.
"""

import re
from collections.abc import Iterable, Iterator

__all__ = ["Evaluated", "repository"]

_COMMIT = re.compile(r"\.[0-9a-f]{7,40}$")
_WORD = re.compile(r"\w+")


def repository(name: str) -> str:
    """`owner/name`, or `name` alone where no owner is told; lower case."""
    path = re.sub(r"^[a-z+]+://[^/]+/|^[^/@\s]+@[^/:\s]+:", "", name.strip().lower())
    path = path.strip("/").removesuffix(".git")
    last = path.rpartition("/")[2]
    if "__" in last:
        return _COMMIT.sub("", last).replace("__", "/", 1)
    return path


class Evaluated:
    """Repositories and statements that training must not see."""

    def __init__(self, repos: Iterable[str], statements: Iterable[str], *, ngram: int | None) -> None:
        self._repos = {repository(repo) for repo in repos}
        self._bare = {repo.rpartition("/")[2] for repo in self._repos}
        self._ngram = ngram
        self._seen = {gram for text in statements for gram in self._grams(text)}

    def has_repository(self, name: str) -> bool:
        """Whether it is one of them."""
        wanted = repository(name)
        return wanted in (self._repos if "/" in wanted else self._bare) or wanted.rpartition("/")[2] in self._repos

    def has_statement(self, text: str) -> bool:
        """Whether a text shares `ngram` words in a row with one of them."""
        return any(gram in self._seen for gram in self._grams(text))

    def _grams(self, text: str) -> Iterator[int]:
        """Their hashes: a million of them are some megabytes, and two that are equal by chance are not to be feared."""
        if self._ngram is None:
            return
        words = _WORD.findall(text.lower())
        for first in range(len(words) - self._ngram + 1):
            yield hash(tuple(words[first : first + self._ngram]))
