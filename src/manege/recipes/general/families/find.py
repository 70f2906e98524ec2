"""find: a value that stands somewhere in the files.

Levels: 1 in the file named; 2 in one of six; 3 in folders, among values of others and former ones; 4 behind pointers
from file to file; 5 in the one record of many that meets two conditions.
"""

import itertools

from manege.recipes.general.draw import CITIES, NAMES, Draw
from manege.recipes.general.families.problem import Family, Problem, answered

__all__ = ["FAMILY"]

_FOLDERS = ("docs", "docs/old", "mail", "mail/2024", "team", "team/notes")
_ROLES = ("cook", "driver", "nurse", "pilot", "tailor", "welder")


def make(draw: Draw, level: int) -> Problem:
    """See the module."""
    return (_named, _among, _nested, _chained, _matching)[level - 1](draw)


def _named(draw: Draw) -> Problem:
    word, code = draw.word(), draw.code()
    file = f"{word}.txt"
    return Problem(
        question=f"Read the code in {file}.",
        files={file: f"code={code}\n"},
        hidden={"value": code},
        solution=f"sed -n 's/^code=//p' {file} > answer.txt",
    )


def _among(draw: Draw) -> Problem:
    words, codes = draw.words(6), draw.codes(6)
    files = {
        f"file{n}.txt": f"The code of {word} is {code}\n"
        for n, (word, code) in enumerate(zip(words, codes, strict=True), 1)
    }
    asked = draw.between(0, 5)
    return Problem(
        question=f"What is the code of {words[asked]}? It is in one of the files here.",
        files=files,
        hidden={"value": codes[asked]},
        solution=f"grep -h 'code of {words[asked]} is' * | sed 's/.* //' > answer.txt",
    )


def _nested(draw: Draw) -> Problem:
    words, codes = draw.words(12), draw.codes(24)
    lines: dict[str, list[str]] = {}
    for n, word in enumerate(words):
        now, before = codes[2 * n : 2 * n + 2]
        for line in (f"code of {word}: {now}", f"former code of {word}: {before}"):
            path = f"{draw.rng.choice(_FOLDERS)}/note{draw.between(1, 4)}.txt"
            lines.setdefault(path, []).append(line)
    return Problem(
        question=f"The files are in folders. What is the code of {words[0]} now? Former codes do not count.",
        files={path: "".join(f"{line}\n" for line in draw.rng.sample(text, len(text))) for path, text in lines.items()},
        hidden={"value": codes[0]},
        solution=f"grep -rhE '^code of {words[0]}:' . | sed 's/.*: //' > answer.txt",
    )


def _chained(draw: Draw) -> Problem:
    words, codes = draw.words(8), draw.codes(5)
    paths = [f"{draw.rng.choice(_FOLDERS)}/{word}.txt" for word in words]
    chain, rest = paths[:4], paths[4:]
    files = {path: f"code={code}\n" for path, code in zip(rest, codes[1:], strict=True)}
    files |= {path: f"moved to {after}\n" for path, after in itertools.pairwise(chain)}
    files[chain[-1]] = f"code={codes[0]}\n"
    return Problem(
        question=f"What is the code? It was in {chain[0]}; a file may say where it was moved.",
        files=files,
        hidden={"value": codes[0]},
        solution=(
            f"file={chain[0]}; while grep -q '^moved to' $file; do file=$(sed 's/moved to //' $file); done; "
            "sed 's/code=//' $file > answer.txt"
        ),
    )


def _matching(draw: Draw) -> Problem:
    cities, codes = draw.words(4, CITIES), draw.codes(24)
    pairs = [(city, role) for city in cities for role in _ROLES]
    draw.rng.shuffle(pairs)
    names = draw.words(12, NAMES)
    files = {}
    for n, ((city, role), code) in enumerate(zip(pairs, codes, strict=True)):
        record = [f"name: {names[n % 12]}", f"city: {city}", f"role: {role}", f"badge: {code}"]
        files[f"{draw.rng.choice(_FOLDERS)}/person{n}.txt"] = "\n".join(draw.rng.sample(record, 4)) + "\n"
    (city, role), code = pairs[0], codes[0]
    return Problem(
        question=f"Each file in these folders is a person. What is the badge of the {role} in {city}?",
        files=files,
        hidden={"value": code},
        solution=(
            f"file=$(grep -rl 'city: {city}' . | xargs grep -l 'role: {role}'); "
            "sed -n 's/badge: //p' $file > answer.txt"
        ),
    )


FAMILY = Family(make=make, score=answered)
