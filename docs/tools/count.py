"""Prints the lines of the library per part, recipes apart: code lines (no blank line, comment or docstring) and all."""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "manege"
AIM = 8000
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Lines that carry a token other than a comment or a docstring."""
    carried: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            carried.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            carried.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(carried)


def main() -> int:
    """The count is information; only a file that outgrew one idea is an error."""
    code: Counter[str] = Counter()
    total: Counter[str] = Counter()
    too_long = []
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts
        name = part[0] if len(part) > 1 else "(top)"
        text = path.read_text(encoding="utf-8")
        code[name] += code_lines(text)
        total[name] += (count := len(text.splitlines()))
        if count > 400:
            too_long.append(f"{path.relative_to(SOURCE)}: {count} lines; past 400 ask what second idea moved in")
    recipes = code.pop("recipes", 0), total.pop("recipes", 0)
    for name, count in sorted(code.items()):
        print(f"{count:6} code {total[name]:6} all  {name}")
    print(f"{sum(code.values()):6} code {sum(total.values()):6} all  in sum, of {AIM} aimed at; recipes {recipes[0]}")
    for message in too_long:
        print(message, file=sys.stderr)
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
