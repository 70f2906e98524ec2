"""Checks that links between the project's Markdown files, and `file` paths named in AGENTS.md, lead somewhere."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
MAP_PATH = re.compile(r"`((?:src|tests|docs|benchmarks)/[\w/.-]+)`")


def main() -> int:
    """One line per dead link."""
    dead = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")]:
        text = page.read_text(encoding="utf-8")
        targets = [page.parent / link for link in LINK.findall(text)]
        if page.name == "AGENTS.md":
            targets += [ROOT / path for path in MAP_PATH.findall(text)]
        dead += [f"{page.relative_to(ROOT)}: {target}" for target in targets if not target.exists()]
    for line in dead:
        print("dead link:", line, file=sys.stderr)
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
