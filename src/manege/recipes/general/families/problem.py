"""A task of a family, and what all families have in common."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from manege.recipes.general.draw import Draw
from manege.recipes.general.left import Left
from manege.types import JsonObject

__all__ = ["PART", "Family", "Problem", "answered", "right_lines", "wanted_lines"]

PART = 0.5
"""The most that work which is not all right can earn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One task, whole."""

    question: str
    """What the agent is asked."""
    files: Mapping[str, str]
    """The workspace, by path."""
    hidden: JsonObject
    """What the family's scorer needs."""
    answers: bool = True
    """Whether the outcome is an answer; else it is a file that the question names."""
    solution: str
    """A shell script that solves it with what question and files say; for tests, never part of a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Tasks of one kind."""

    make: Callable[[Draw, int], Problem]
    """At a level from 1 to 5."""
    score: Callable[[JsonObject, Left], float]
    """1 exactly for success; less for a part of it, and nothing for what stood in the workspace already."""


def answered(hidden: JsonObject, left: Left) -> float:
    """The score of a family that asks for one value: spaces do not count."""
    return float(" ".join(left.answer().split()) == hidden["value"])


def wanted_lines(file: str, lines: Sequence[str], files: Mapping[str, str]) -> JsonObject:
    """The hidden part of a task that asks for a file of these lines."""
    given = {line.strip() for text in files.values() for line in text.splitlines()}
    return {"file": file, "lines": list(lines), "new": [line not in given for line in lines]}


def right_lines(hidden: JsonObject, left: Left) -> float:
    """The score of a family that asks for a file: 1 for its lines; else a part for those that are in their place and
    stand in no file of the task."""
    expected, found = hidden["lines"], left.lines(hidden["file"])
    if found == expected:
        return 1.0
    num_right = sum(a == b and new for a, b, new in zip(expected, found, hidden["new"], strict=False))
    return PART * num_right / max(len(expected), len(found))
