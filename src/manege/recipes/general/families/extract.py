"""extract: what a text says, in a form that a program can use.

Levels: 1 the one mail address of a note; 2 the phone number of one of many people; 3 all order numbers, in order, into
a file; 4 the errors of a log as CSV; 5 blocks of an address book as JSON lines.
"""

import json

from manege.recipes.general.draw import CITIES, NAMES, Draw
from manege.recipes.general.families.problem import Family, Problem, answered, right_lines, wanted_lines
from manege.recipes.general.left import Left
from manege.types import JsonObject

__all__ = ["FAMILY"]

_FILLER = ("The meeting went on.", "Nobody asked for more.", "See the last letter.", "It rained all day.")


def make(draw: Draw, level: int) -> Problem:
    """See the module."""
    return (_mail, _phone, _orders, _errors, _people)[level - 1](draw)


def score(hidden: JsonObject, left: Left) -> float:
    """Levels 1 and 2 ask for a value, the others for a file."""
    return right_lines(hidden, left) if "lines" in hidden else answered(hidden, left)


def _mail(draw: Draw) -> Problem:
    name, word, file = draw.word(NAMES), draw.word(), f"{draw.word()}.txt"
    mail = f"{name.lower()}{draw.code()}@{word}.org"
    return Problem(
        question=f"Read the mail address in {file}.",
        files={file: f"Write to {name}: {mail}\n"},
        hidden={"value": mail},
        solution=f"grep -oE '[^ ]+@[^ ]+' {file} > answer.txt",
    )


def _phone(draw: Draw) -> Problem:
    names, codes = draw.words(8, NAMES), draw.codes(16)
    lines = [f"{name} can be reached at {codes[n]}-{codes[n + 8]} after noon." for n, name in enumerate(names)]
    draw.rng.shuffle(lines)
    return Problem(
        question=f"What is the phone number of {names[0]}? It is in phones.txt. Answer as 123-456.",
        files={"phones.txt": "\n".join(lines) + "\n"},
        hidden={"value": f"{codes[0]}-{codes[8]}"},
        solution=f"grep '^{names[0]} ' phones.txt | grep -oE '[0-9]+-[0-9]+' > answer.txt",
    )


def _orders(draw: Draw) -> Problem:
    orders = [f"{draw.rng.choice('ABCDE')}{draw.rng.choice('KLMN')}-{code}" for code in draw.codes(10)]
    lines = []
    for order in orders:
        lines += [draw.rng.choice(_FILLER), f"{draw.word(NAMES)} asks about order {order}, please."]
    files = {"letter.txt": "\n".join(lines) + "\n"}
    return Problem(
        question=(
            "letter.txt mentions order numbers such as XY-123. Write all of them, in their order, one a line, "
            "to orders.txt."
        ),
        files=files,
        hidden=wanted_lines("orders.txt", orders, files),
        answers=False,
        solution="grep -oE '[A-Z]{2}-[0-9]{3}' letter.txt > orders.txt",
    )


def _errors(draw: Draw) -> Problem:
    lines, wanted = [], []
    names = draw.words(6, NAMES)
    kinds = ["ERROR"] * 8 + ["INFO"] * 20 + ["WARNING"] * 8
    draw.rng.shuffle(kinds)
    minute = 0
    for kind in kinds:
        minute += draw.between(1, 30)
        time, name, code = f"{minute // 60:02}:{minute % 60:02}", draw.rng.choice(names), draw.code()
        lines.append(f"[{time}] {kind} user={name} code={code} {draw.rng.choice(_FILLER)}")
        if kind == "ERROR":
            wanted.append(f"{time},{name},{code}")
    files = {"server.log": "\n".join(lines) + "\n"}
    return Problem(
        question=(
            "Write the lines of kind ERROR of server.log to errors.csv, in their order, without a header: "
            "time,user,code, for example 07:30,Bob,123."
        ),
        files=files,
        hidden=wanted_lines("errors.csv", wanted, files),
        answers=False,
        solution=r"sed -nE 's/^\[(.*)\] ERROR user=(\w+) code=(\w+) .*/\1,\2,\3/p' server.log > errors.csv",
    )


def _people(draw: Draw) -> Problem:
    people = []
    for name in draw.words(8, NAMES):
        people.append({"city": draw.word(CITIES), "name": name, "phone": f"{draw.code()}-{draw.code()}"})
    blocks = []
    for person in people:
        fields = [f"  City:  {person['city']}", f"  Phone: {person['phone']}", f"  Note:  {draw.rng.choice(_FILLER)}"]
        blocks.append("\n".join([f"== {person['name']} ==", *draw.rng.sample(fields, 3)]))
    files = {"people.txt": "\n\n".join(blocks) + "\n"}
    wanted = [json.dumps(person) for person in sorted(people, key=lambda person: person["name"])]
    example = json.dumps({"city": "Rome", "name": "Bob", "phone": "123-456"})
    program = (
        "import json, re\n"
        "people = []\n"
        "for block in open('people.txt').read().split('\\n\\n'):\n"
        "    name = re.search('== (.*) ==', block)[1]\n"
        "    city, phone = re.search('City: +(.*)', block)[1], re.search('Phone: +(.*)', block)[1]\n"
        "    people.append({'city': city, 'name': name, 'phone': phone})\n"
        "people.sort(key=lambda person: person['name'])\n"
        "open('people.jsonl', 'w').write(''.join(json.dumps(person) + '\\n' for person in people))\n"
    )
    return Problem(
        question=(
            "people.txt has a block for each person. Write people.jsonl: a line for each, sorted by name, "
            f"exactly in this form: {example}"
        ),
        files=files,
        hidden=wanted_lines("people.jsonl", wanted, files),
        answers=False,
        solution=f"python3 - <<'END'\n{program}END",
    )


FAMILY = Family(make=make, score=score)
