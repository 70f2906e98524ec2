"""What an agent is told of a bug: the words of an issue, made from what failed. Pure.

It says how the bug shows (what the tests that fail are called, in words, and the errors), and what the function says of
itself, as someone who uses the package could. It names neither tests nor their files, nor what was changed.
"""

import re

from manege.recipes.coding.packages import Package
from manege.recipes.coding.validate import Bug

__all__ = ["describe"]

_SHOWN = 4
"""Symptoms."""
_ERROR_CHARS = 200
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_PATH = re.compile(r"(/[\w.@-]+){2,}")


def describe(package: Package, bug: Bug) -> str:
    """The issue."""
    seen = {_symptom(test): _error(bug.messages[test]) for test in reversed(bug.failing)}
    symptoms = list(reversed(seen.items()))
    lines = [f"{package.name} {package.version}: {symptoms[0][0]} is broken", ""]
    lines.append(f"Some of what {package.name} does is wrong since the last change. What I see:")
    lines += [f"- {symptom}: {error}" for symptom, error in symptoms[:_SHOWN]]
    if len(symptoms) > _SHOWN:
        lines.append(f"- and {len(symptoms) - _SHOWN} more")
    if promise := _first_sentence(bug.docstring):
        lines += ["", f'The documentation says: "{promise}"']
    lines += ["", "Please find the cause in the package's code and repair it, so that all of this works again."]
    return "\n".join(lines)


def _symptom(test: str) -> str:
    """`tests/test_core.py::TestTake::test_take_empty[3-x]` -> `take empty`."""
    name = test.rpartition("::")[2].partition("[")[0]
    words = re.sub(r"^tests?_?", "", name) or test.split("::")[-2].removeprefix("Test")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", words).replace("_", " ").strip().lower()


def _error(message: str) -> str:
    """Its first line, without what differs from run to run."""
    text = _PATH.sub("...", _ADDRESS.sub("0x...", message.strip().partition("\n")[0]))
    return text[:_ERROR_CHARS] or "an error"


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph)[0][:_ERROR_CHARS]
