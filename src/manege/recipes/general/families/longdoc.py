"""longdoc: a document that is too long to be read whole.

Levels, from fifty lines to six thousand: 1 a fee; 2 the section that a fact stands in; 3 a fee that was changed several
times; 4 a fee that another section sets; 5 the sum of all contracts of a person that were not cancelled.
"""

from collections.abc import Sequence

from manege.recipes.general.draw import CITIES, NAMES, WORDS, Draw
from manege.recipes.general.families.problem import Family, Problem, answered

__all__ = ["FAMILY"]

_NUM_LINES = (50, 400, 1500, 3000, 6000)
_SECTION_LINES = 25
_FIRST_LINE = 12
"""Nothing that is asked for stands at the beginning."""


def make(draw: Draw, level: int) -> Problem:
    """See the module."""
    return (_fee, _section, _changed, _set_elsewhere, _contracts)[level - 1](draw, _NUM_LINES[level - 1])


def _document(draw: Draw, num_lines: int, facts: Sequence[str], *, sections: bool = True) -> tuple[str, list[int]]:
    """The text, and the number of the section that each fact stands in; facts keep their order."""
    places = sorted(draw.rng.sample(range(_FIRST_LINE, num_lines), len(facts)))
    by_place = dict(zip(places, facts, strict=True))
    names, words, cities = draw.words(10, NAMES), draw.words(12, WORDS), draw.words(5, CITIES)
    lines = []
    for n in range(num_lines):
        if sections and n % _SECTION_LINES == 0:
            lines.append(f"## {n // _SECTION_LINES + 1}. On {draw.rng.choice(words)}s")
        name, word, city = draw.rng.choice(names), draw.rng.choice(words), draw.rng.choice(cities)
        filler = (
            f"{name} spoke of the {word} that was seen in {city}.",
            f"In {city} the price of each {word} was much discussed.",
            f"{name} has not been to {city} since.",
        )
        lines.append(by_place.get(n) or draw.rng.choice(filler))
    return "\n".join(lines) + "\n", [place // _SECTION_LINES + 1 for place in places]


def _fee(draw: Draw, num_lines: int) -> Problem:
    words, codes, file = draw.words(4), draw.codes(4), f"{draw.word()}.txt"
    facts = [f"The fee of {word} is {code}" for word, code in zip(words, codes, strict=True)]
    draw.rng.shuffle(facts)
    text, _ = _document(draw, num_lines, facts, sections=False)
    return Problem(
        question=f"Find the fee of {words[0]} in {file}.",
        files={file: text},
        hidden={"value": codes[0]},
        solution=f"grep 'fee of {words[0]} is' {file} | sed 's/.* //' > answer.txt",
    )


def _section(draw: Draw, num_lines: int) -> Problem:
    words, names, city = draw.words(5), draw.words(5, NAMES), draw.word(CITIES)
    facts = [f"{name} sold the last {word} to {city}." for name, word in zip(names, words, strict=True)]
    text, sections = _document(draw, num_lines, facts)
    asked = draw.between(0, 4)
    return Problem(
        question=(
            f"In which section of report.txt does {names[asked]} sell the last {words[asked]}? Answer with its number."
        ),
        files={"report.txt": text},
        hidden={"value": str(sections[asked])},
        solution=(
            r"awk '/^## /{sub(/\..*/, \"\"); n=$2} /SOLD/{print n}' report.txt > answer.txt".replace(
                r"\"", '"'
            ).replace("SOLD", f"^{names[asked]} sold the last {words[asked]} ")
        ),
    )


def _changed(draw: Draw, num_lines: int) -> Problem:
    words, codes = draw.words(3), draw.codes(15)
    facts = [f"From now on the fee of {words[n % 3]} is {code}." for n, code in enumerate(codes)]
    draw.rng.shuffle(facts)
    text, _ = _document(draw, num_lines, facts)
    last = [fact for fact in facts if f"of {words[0]} " in fact][-1]
    return Problem(
        question=f"report.txt sets the fee of {words[0]} several times; the last one counts. What is it?",
        files={"report.txt": text},
        hidden={"value": last.rstrip(".").split()[-1]},
        solution=f"grep 'the fee of {words[0]} is' report.txt | tail -n 1 | grep -oE '[0-9]+' > answer.txt",
    )


def _set_elsewhere(draw: Draw, num_lines: int) -> Problem:
    words, codes = draw.words(4), draw.codes(4)
    sections = draw.rng.sample(range(2, num_lines // _SECTION_LINES), 4)
    text, _ = _document(draw, num_lines, [])
    lines = text.splitlines()
    for section, code in zip(sections, codes, strict=True):
        heading = next(n for n, line in enumerate(lines) if line.startswith(f"## {section}. "))
        lines[heading + draw.between(2, 20)] = f"The fee that this section sets is {code}."
    for word, section in zip(words, sections, strict=True):
        free = [n for n, line in enumerate(lines) if n > _FIRST_LINE and not line.startswith(("##", "The fee"))]
        lines[draw.rng.choice(free)] = f"The fee of {word} is the one that section {section} sets."
    return Problem(
        question=f"What is the fee of {words[0]} according to report.txt?",
        files={"report.txt": "\n".join(lines) + "\n"},
        hidden={"value": codes[0]},
        solution=(
            f"n=$(grep 'fee of {words[0]} is' report.txt | grep -oE '[0-9]+'); "
            "sed -n \"/^## $n\\. /,/^## $((n + 1))\\. /p\" report.txt | grep 'this section sets' | "
            "grep -oE '[0-9]+' > answer.txt"
        ),
    )


def _contracts(draw: Draw, num_lines: int) -> Problem:
    names, codes = draw.words(4, NAMES), draw.codes(48)
    fees = [draw.between(10, 990) for _ in codes]
    facts = [f"Contract {code}: {names[n % 4]} pays {fees[n]}." for n, code in enumerate(codes)]
    void = draw.rng.sample(range(48), 16)
    facts = draw.rng.sample(facts, 48) + [f"Contract {codes[n]} is cancelled." for n in void]
    text, _ = _document(draw, num_lines, facts)
    total = sum(fee for n, fee in enumerate(fees) if n % 4 == 0 and n not in void)
    return Problem(
        question=(
            f"report.txt has contracts, such as: Contract 100: Bob pays 20. Some are cancelled later on. How much does "
            f"{names[0]} pay in all, by the contracts that are not cancelled?"
        ),
        files={"report.txt": text},
        hidden={"value": str(total)},
        solution=(
            "awk 'NR == FNR {if (/is cancelled/) void[$2] = 1; next} "
            f'$3 == "{names[0]}" && $4 == "pays" && !(substr($2, 1, 3) in void) {{s += $5}} END {{print s + 0}}\' '
            "report.txt report.txt > answer.txt"
        ),
    )


FAMILY = Family(make=make, score=answered)
