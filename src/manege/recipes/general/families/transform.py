"""transform: files into another form.

Levels: 1 lines sorted; 2 two columns of a table, swapped; 3 rows that meet a condition, sorted by a number; 4 a table
grouped, as JSON lines; 5 two tables joined, summed and sorted.
"""

import json

from manege.recipes.general.draw import CITIES, NAMES, WORDS, Draw
from manege.recipes.general.families.problem import Family, Problem, right_lines, wanted_lines

__all__ = ["FAMILY"]


def make(draw: Draw, level: int) -> Problem:
    """See the module."""
    return (_sorted, _columns, _rows, _grouped, _joined)[level - 1](draw)


def _problem(question: str, files: dict[str, str], file: str, lines: list[str], solution: str) -> Problem:
    return Problem(
        question=question,
        files=files,
        hidden=wanted_lines(file, lines, files),
        answers=False,
        solution=solution,
    )


def _python(program: str) -> str:
    return f"python3 - <<'END'\n{program}END"


def _sorted(draw: Draw) -> Problem:
    source, target = (f"{word}.txt" for word in draw.words(2))
    words = draw.words(6)
    while words in (sorted(words), sorted(words)[::-1]):
        draw.rng.shuffle(words)
    question = f"Sort the lines of {source} and write them to {target}."
    files = {source: "\n".join(words) + "\n"}
    return _problem(question, files, target, sorted(words), f"sort {source} > {target}")


def _columns(draw: Draw) -> Problem:
    rows = [(draw.word(NAMES), draw.word(CITIES), draw.code()) for _ in range(8)]
    files = {"people.csv": "name,city,code\n" + "".join(",".join(row) + "\n" for row in rows)}
    question = "Write code and name of each row of people.csv to codes.csv, as code,name, without a header."
    lines = [f"{code},{name}" for name, _, code in rows]
    solution = "tail -n +2 people.csv | awk -F, '{print $3 \",\" $1}' > codes.csv"
    return _problem(question, files, "codes.csv", lines, solution)


def _rows(draw: Draw) -> Problem:
    rows = list(zip(draw.words(14), draw.rng.sample(range(10, 500), 14), draw.codes(14), strict=True))
    limit = sorted(price for _, price, _ in rows)[7]
    files = {"items.csv": "item,price,code\n" + "".join(f"{item},{price},{code}\n" for item, price, code in rows)}
    question = (
        f"Write the items of items.csv with a price of at least {limit} to dear.txt, the dearest first, each as "
        "ITEM (CODE): PRICE, for example spoon (100): 25."
    )
    kept = sorted((row for row in rows if row[1] >= limit), key=lambda row: -row[1])
    lines = [f"{item} ({code}): {price}" for item, price, code in kept]
    solution = (
        f"tail -n +2 items.csv | awk -F, '$2 >= {limit}' | sort -t, -k2,2nr | "
        'awk -F, \'{print $1 " (" $3 "): " $2}\' > dear.txt'
    )
    return _problem(question, files, "dear.txt", lines, solution)


def _grouped(draw: Draw) -> Problem:
    cities, words = draw.words(4, CITIES), draw.words(12)
    rows = [(word, draw.rng.choice(cities), draw.code()) for word in words]
    files = {"stock.csv": "item,city,code\n" + "".join(",".join(row) + "\n" for row in rows)}
    example = json.dumps({"city": "Rome", "items": ["fork", "spoon"]})
    question = (
        "Group the rows of stock.csv by city and write stock.jsonl: a line for each city, sorted by city, the names of "
        f"its items sorted, exactly in this form: {example}"
    )
    lines = [
        json.dumps({"city": city, "items": sorted(item for item, place, _ in rows if place == city)})
        for city in sorted({city for _, city, _ in rows})
    ]
    program = (
        "import csv, json\n"
        "groups = {}\n"
        "for row in csv.DictReader(open('stock.csv')):\n"
        "    groups.setdefault(row['city'], []).append(row['item'])\n"
        "with open('stock.jsonl', 'w') as file:\n"
        "    for city in sorted(groups):\n"
        "        file.write(json.dumps({'city': city, 'items': sorted(groups[city])}) + '\\n')\n"
    )
    return _problem(question, files, "stock.jsonl", lines, _python(program))


def _joined(draw: Draw) -> Problem:
    names, codes, items = draw.words(6, NAMES), draw.codes(6), draw.words(8, WORDS)
    prices = [draw.between(2, 60) for _ in items]
    orders = [(draw.rng.choice(codes), n, draw.between(1, 9)) for n in (draw.between(0, 7) for _ in range(30))]
    files = {
        "customers.csv": "id,name\n" + "".join(f"{code},{name}\n" for code, name in zip(codes, names, strict=True)),
        "prices.csv": "item,price\n" + "".join(f"{item},{price}\n" for item, price in zip(items, prices, strict=True)),
        "orders.csv": "customer,item,count\n" + "".join(f"{code},{items[n]},{count}\n" for code, n, count in orders),
    }
    totals = dict.fromkeys(names, 0)
    for code, n, count in orders:
        totals[names[codes.index(code)]] += prices[n] * count
    ranked = sorted(totals.items(), key=lambda pair: (-pair[1], pair[0]))
    question = (
        "orders.csv has the id of a customer, an item and a count; customers.csv and prices.csv say who and how much. "
        "Write to totals.csv, without a header, name,total of every customer, the highest total first, equal ones by "
        "name; who ordered nothing has 0."
    )
    program = (
        "import csv\n"
        "rows = {name: list(csv.DictReader(open(name + '.csv'))) for name in ('customers', 'prices', 'orders')}\n"
        "price = {row['item']: int(row['price']) for row in rows['prices']}\n"
        "total = {row['id']: 0 for row in rows['customers']}\n"
        "for row in rows['orders']:\n"
        "    total[row['customer']] += price[row['item']] * int(row['count'])\n"
        "pairs = [(-total[row['id']], row['name']) for row in rows['customers']]\n"
        "open('totals.csv', 'w').write(''.join(f'{name},{-negative}\\n' for negative, name in sorted(pairs)))\n"
    )
    return _problem(question, files, "totals.csv", [f"{name},{total}" for name, total in ranked], _python(program))


FAMILY = Family(make=make, score=right_lines)
