"""Prints the lines of the library per part; recipes and static files apart."""

import sys
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "manege"
AIM = 8000


def main() -> int:
    """The count is information; only a file that outgrew one idea is an error."""
    lines: Counter[str] = Counter()
    too_long = []
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts
        name = part[0] if len(part) > 1 else "(top)"
        count = len(path.read_text(encoding="utf-8").splitlines())
        lines[name] += count
        if count > 400:
            too_long.append(f"{path.relative_to(SOURCE)}: {count} lines; past 400 ask what second idea moved in")
    recipes = lines.pop("recipes", 0)
    for name, count in sorted(lines.items()):
        print(f"{count:6} {name}")
    print(f"{sum(lines.values()):6} in all, of {AIM} aimed at; recipes apart: {recipes}")
    for message in too_long:
        print(message, file=sys.stderr)
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
