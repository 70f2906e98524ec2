"""The table of docs/study/reward-hacking.md: which cheat is paid under which guards.

`python -m tests.cheats` measures it and writes it into the page; a test measures it again and compares.
"""

from pathlib import Path

from tests.cheats.cells import GUARDS, measure
from tests.cheats.routes import CHEATS, HONEST, Cheat

PAGE = Path(__file__).parents[2] / "docs/study/reward-hacking.md"
BEGIN, END = "<!-- measured by `python -m tests.cheats` -->\n", "<!-- end -->\n"
COLUMNS = {
    "none": (),
    **{guard: (guard,) for guard in GUARDS},
    "sandbox + report": ("sandbox", "report"),
    "all": tuple(GUARDS),
}
ROWS = {"(honest work)": Cheat(agent=HONEST, told="")} | CHEATS


async def measured(client, place):
    """Lines of the table."""
    cells = {column: await measure(client, place, ROWS, guards) for column, guards in COLUMNS.items()}
    lines = [f"| cheat | {' | '.join(COLUMNS)} | told of |", f"|---|{'---|' * (len(COLUMNS) + 1)}"]
    for row in ROWS:
        rewards = " | ".join(_shown(cells[column][row].reward) for column in COLUMNS)
        lines.append(f"| {row} | {rewards} | {kinds(cells['all'][row])} |")
    return "\n".join(lines) + "\n"


def kinds(cell):
    """Of its hack report."""
    told = (f"{kind}{'' if flags else ' (no flag)'}" for kind, flags in sorted(cell.told.items()))
    return ", ".join(told) or "nothing"


def written():
    """The table as it stands in the page."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def write(table):
    """Put it into the page."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{table}{END}{rest.partition(END)[2]}", encoding="utf-8")


def _shown(reward):
    return "no verdict" if reward is None else f"**{reward:g}**" if reward else "0"
