"""compute: a number that the files imply.

Levels: 1 the lines of a file; 2 a sum; 3 what one of many spent, in cents; 4 the greatest mean of groups; 5 the most
sessions open at once, and for how long.
"""

from manege.recipes.general.draw import CITIES, NAMES, Draw
from manege.recipes.general.families.problem import Family, Problem, answered

__all__ = ["FAMILY"]


def make(draw: Draw, level: int) -> Problem:
    """See the module."""
    return (_count, _sum, _spent, _mean, _sessions)[level - 1](draw)


def _count(draw: Draw) -> Problem:
    word, num = draw.word(), draw.between(101, 998)
    return Problem(
        question=f"Count the lines of {word}.txt.",
        files={f"{word}.txt": "".join(f"{draw.between(1, 9)}\n" for _ in range(num))},
        hidden={"value": str(num)},
        solution=f"wc -l < {word}.txt > answer.txt",
    )


def _sum(draw: Draw) -> Problem:
    word = draw.word()
    numbers = [draw.between(1, 999) for _ in range(draw.between(8, 40))]
    return Problem(
        question=f"What is the sum of the numbers in {word}.txt?",
        files={f"{word}.txt": "".join(f"{number}\n" for number in numbers)},
        hidden={"value": str(sum(numbers))},
        solution=f"awk '{{s += $1}} END {{print s}}' {word}.txt > answer.txt",
    )


def _spent(draw: Draw) -> Problem:
    names = draw.words(6, NAMES)
    rows = [(draw.rng.choice(names), draw.between(100, 99999)) for _ in range(40)] + [(names[0], 1234)]
    draw.rng.shuffle(rows)
    total = sum(cents for name, cents in rows if name == names[0])
    lines = [f"{name};{draw.word()};{cents // 100}.{cents % 100:02}" for name, cents in rows]
    return Problem(
        question=(
            f"spent.csv has name;item;amount. How much did {names[0]} spend in all? Answer with two decimals, "
            "for example 12.50."
        ),
        files={"spent.csv": "name;item;amount\n" + "\n".join(lines) + "\n"},
        hidden={"value": f"{total // 100}.{total % 100:02}"},
        solution=f"awk -F';' '$1 == \"{names[0]}\" {{s += $3}} END {{printf \"%.2f\", s}}' spent.csv > answer.txt",
    )


def _mean(draw: Draw) -> Problem:
    cities = draw.words(5, CITIES)
    # Eight of each, so that no mean of whole numbers lies between two values of three decimals.
    values = {city: [draw.between(0, 400) for _ in range(8)] for city in cities}
    values[cities[0]] = [value + 400 for value in values[cities[0]]]
    rows = [f"{city},{value}" for city in cities for value in values[city]]
    draw.rng.shuffle(rows)
    mean = sum(values[cities[0]]) / 8
    return Problem(
        question=(
            "rain.csv has city,millimetres. Which city has the greatest mean, and what is it? Answer with three "
            "decimals, for example Rome 12.500."
        ),
        files={"rain.csv": "city,millimetres\n" + "\n".join(rows) + "\n"},
        hidden={"value": f"{cities[0]} {mean:.3f}"},
        solution=(
            'tail -n +2 rain.csv | awk -F, \'{s[$1] += $2; n[$1]++} END {for (c in s) printf "%s %.3f\\n", c, '
            "s[c] / n[c]}' | sort -k2,2nr | head -n 1 > answer.txt"
        ),
    )


def _sessions(draw: Draw) -> Problem:
    starts = sorted(draw.between(0, 1200) for _ in range(30))
    sessions = [(start, start + draw.between(10, 240)) for start in starts]
    num_open = [sum(start <= minute < end for start, end in sessions) for minute in range(1440)]
    lines = [f"{draw.word(NAMES)},{_clock(start)},{_clock(end)}" for start, end in sessions]
    draw.rng.shuffle(lines)
    most = max(num_open)
    program = (
        "import csv\n"
        "minutes = [0] * 1440\n"
        "for row in csv.DictReader(open('sessions.csv')):\n"
        "    start, end = (int(row[key][:2]) * 60 + int(row[key][3:]) for key in ('start', 'end'))\n"
        "    for minute in range(start, end):\n"
        "        minutes[minute] += 1\n"
        "print(max(minutes), minutes.count(max(minutes)), file=open('answer.txt', 'w'))\n"
    )
    return Problem(
        question=(
            "sessions.csv has user,start,end of sessions of one day; a session is no longer open in the minute of its "
            "end. How many were open at once at most, and during how many minutes of the day were that many open? "
            "Answer with both numbers, for example 4 17."
        ),
        files={"sessions.csv": "user,start,end\n" + "\n".join(lines) + "\n"},
        hidden={"value": f"{most} {num_open.count(most)}"},
        solution=f"python3 - <<'END'\n{program}END",
    )


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


FAMILY = Family(make=make, score=answered)
