"""Unified diffs of text files: made, and applied exactly.

Only what `make` writes and what `git diff` gives of changed text: no renames, no modes, no new files.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from manege.errors import HarnessError

__all__ = ["applied", "apply", "make", "paths"]

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


def make(path: str, before: str, after: str) -> str:
    """From one text of a file to another."""
    diff = difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}")
    shown = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff)
    return f"diff --git a/{path} b/{path}\n" + "".join(shown)


def applied(patch: str, path: str, before: str) -> str:
    """What it makes of one file's text. Raises ValueError."""
    return "".join(line for name, hunks in _files(patch) if name == path for line in _patched(_lines(before), hunks))


def paths(patch: str) -> Sequence[str]:
    """Of the files that it changes."""
    return [path for path, _ in _files(patch)]


def apply(patch: str, folder: Path) -> None:
    """To files below a folder. Raises HarnessError where a file is not what the patch was made from."""
    for path in paths(patch):
        file = folder / path
        try:
            file.write_bytes(applied(patch, path, file.read_bytes().decode()).encode())
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise HarnessError(f"the patch of {path} does not apply in {folder}: {error}") from error


def _lines(text: str) -> Sequence[str]:
    """With their ends; nothing but a line feed ends one."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _files(patch: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Each file with the lines of its hunks."""
    for part in re.split(r"^diff --git .*\n", patch, flags=re.MULTILINE)[1:]:
        lines = _lines(part)
        start = next((number for number, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
        named = [line for line in lines[:start] if line.startswith("+++ b/")]
        if named:
            yield named[0].removeprefix("+++ b/").rstrip("\n"), lines[start:]


def _patched(before: Sequence[str], hunks: Sequence[str]) -> Iterator[str]:
    """Raises ValueError."""
    position = 0
    for number, line in enumerate(hunks):
        if found := _HUNK.match(line):
            start = int(found[1]) - (1 if found[2] != "0" else 0)
            yield from before[position:start]
            position = start
        elif line[0] in " -":
            text = _text(hunks, number)
            if position >= len(before) or before[position] != text:
                raise ValueError(f"line {position + 1} is not {text!r}")
            position += 1
            if line[0] == " ":
                yield text
        elif line[0] == "+":
            yield _text(hunks, number)
    yield from before[position:]


def _text(hunks: Sequence[str], number: int) -> str:
    """Of a line of a hunk; the one after it may say that it has no end."""
    is_open = "".join(hunks[number + 1 : number + 2]).startswith("\\")
    return hunks[number][1:].removesuffix("\n") if is_open else hunks[number][1:]
