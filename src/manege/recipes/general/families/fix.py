"""fix: a Python program that does not do what it should; hidden inputs decide whether it does now.

Levels: 1 it crashes; 2 it computes something else; 3 both; 4 two wrong places; 5 a program of two parts, four wrong
places. Inputs for which the broken program is right already earn nothing.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from manege.recipes.general.draw import Draw
from manege.recipes.general.families.problem import PART, Family, Problem
from manege.recipes.general.left import Left
from manege.types import JsonObject

__all__ = ["FAMILY"]

_NUM_CASES = 6
_MIN_BROKEN = 4
_READ = "import sys\n\nnumbers = [int(word) for word in sys.stdin.read().split()]\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A function of a program, and what can be wrong with it."""

    does: str
    source: str
    """`{name}` is its name, LIMIT a number."""
    crash: Sequence[tuple[str, str]]
    """Right and wrong: it does not run."""
    wrong: Sequence[tuple[str, str]]
    """It runs. Each is in a line of its own, so that several go together."""


_PARTS = (
    _Part(
        does="the sum of all numbers above LIMIT",
        source=(
            "def {name}(numbers):\n"
            "    total = 0\n"
            "    for number in numbers:\n"
            "        if number > LIMIT:\n"
            "            total += number\n"
            "    return total\n"
        ),
        crash=[("total += number", "total += nmber"), ("> LIMIT:", "> LIMIT"), ("return total", "return totl")],
        wrong=[("> LIMIT", "< LIMIT"), ("total = 0", "total = 1"), ("total += number", "total += 1")],
    ),
    _Part(
        does="the sum of all steps up from a number to the next that are at least LIMIT",
        source=(
            "def {name}(numbers):\n"
            "    climbed = 0\n"
            "    for before, now in zip(numbers, numbers[1:]):\n"
            "        step = now - before\n"
            "        if step >= LIMIT:\n"
            "            climbed += step\n"
            "    return climbed\n"
        ),
        crash=[("numbers[1:]", "numbers[1:"), ("climbed = 0", "climbed ="), ("zip(numbers,", "zap(numbers,")],
        wrong=[("numbers[1:]", "numbers[2:]"), ("now - before", "before - now"), ("climbed += step", "climbed = step")],
    ),
    _Part(
        does="the greatest sum of three numbers that follow each other, plus LIMIT",
        source=(
            "def {name}(numbers):\n"
            "    best = -10**9\n"
            "    for start in range(len(numbers) - 2):\n"
            "        window = numbers[start:start + 3]\n"
            "        best = max(best, sum(window))\n"
            "    return best + LIMIT\n"
        ),
        crash=[("len(numbers) - 2", "len(number) - 2"), ("sum(window)", "sum(windows)"), ("start + 3]", "start + 3")],
        wrong=[("start + 3]", "start + 2]"), ("max(best", "min(best"), ("best + LIMIT", "best - LIMIT")],
    ),
    _Part(
        does="the sum of each number times its place, counted from 1, where the number is odd, plus LIMIT",
        source=(
            "def {name}(numbers):\n"
            "    total = LIMIT\n"
            "    for place, number in enumerate(numbers, 1):\n"
            "        if number % 2 == 1:\n"
            "            total += place * number\n"
            "    return total\n"
        ),
        crash=[
            ("enumerate(numbers, 1)", "enumerat(numbers, 1)"),
            ("% 2 == 1", "% 2 = 1"),
            ("numbers, 1):", "numbers, 1:"),
        ],
        wrong=[("numbers, 1)", "numbers)"), ("% 2 == 1", "% 2 == 0"), ("place * number", "place + number")],
    ),
)


def make(draw: Draw, level: int) -> Problem:
    """See the module."""
    parts, limit, script = draw.rng.sample(_PARTS, 1 + (level == 5)), draw.code(), f"{draw.word()}.py"
    right = [
        part.source.format(name=name).replace("LIMIT", limit)
        for part, name in zip(parts, ("first", "second"), strict=False)
    ]
    cases: list[tuple[str, str]] = []
    broken: list[bool] = []
    bad = right
    while sum(broken[2:]) < _MIN_BROKEN:
        bad = [_spoil(draw, source, part, limit, level) for part, source in zip(parts, right, strict=True)]
        cases = _cases(draw, right)
        broken = [_outputs(bad, stdin) != stdout for stdin, stdout in cases]
    does = " and, after a space, ".join(part.does.replace("LIMIT", limit) for part in parts)
    examples = "".join(f"input: {stdin}\noutput: {stdout}\n" for stdin, stdout in cases[:2])
    return Problem(
        question=(
            f"{script} reads whole numbers and should print {does}. It does not. Repair it; examples.txt shows what "
            "is right."
        ),
        files={script: _program(bad), "examples.txt": examples},
        hidden={"script": script, "cases": cases[2:], "broken": broken[2:]},
        answers=False,
        solution=f"printf %s {shlex.quote(_program(right))} > {script}",
    )


def score(hidden: JsonObject, left: Left) -> float:
    """1 if all hidden inputs give what they should; else a part for those that the broken program got wrong, from the
    second one on: one may be luck."""
    right = [left.run(hidden["script"], stdin) == stdout for stdin, stdout in hidden["cases"]]
    if all(right):
        return 1.0
    gained = [good for good, broken in zip(right, hidden["broken"], strict=True) if broken]
    return PART * sum(gained) / len(gained) if sum(gained) > 1 else 0.0


def _spoil(draw: Draw, source: str, part: _Part, limit: str, level: int) -> str:
    chosen = []
    if level in (1, 3, 5):
        chosen.append(draw.rng.choice(part.crash))
    if level > 1:
        chosen += draw.rng.sample(part.wrong, 2 if level == 4 else 1)
    for right, wrong in chosen:
        source = source.replace(right.replace("LIMIT", limit), wrong.replace("LIMIT", limit))
    return source


def _program(functions: Sequence[str]) -> str:
    calls = ", ".join(("first(numbers)", "second(numbers)")[: len(functions)])
    return "\n\n".join([_READ, *functions]) + f"\n\nprint({calls})\n"


def _cases(draw: Draw, functions: Sequence[str]) -> list[tuple[str, str]]:
    """Inputs with their outputs, all different."""
    cases: dict[str, str] = {}
    while len(cases) < _NUM_CASES + 2:
        stdin = " ".join(str(draw.between(-999, 1999)) for _ in range(draw.between(9, 15)))
        cases[_outputs(functions, stdin)] = stdin
    return [(stdin, stdout) for stdout, stdin in cases.items()]


def _outputs(functions: Sequence[str], stdin: str) -> str:
    """What the program of our own functions prints; nothing if it crashes."""
    numbers = [int(word) for word in stdin.split()]
    outputs = []
    for source, name in zip(functions, ("first", "second"), strict=False):
        space: dict[str, object] = {}
        try:
            exec(source, space)
            outputs.append(str(space[name](numbers)))  # pyright: ignore[reportCallIssue]
        # Whatever our misprints raise.
        except Exception:
            return ""
    return " ".join(outputs)


FAMILY = Family(make=make, score=score)
