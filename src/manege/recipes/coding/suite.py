"""A run of a package's tests: how it is asked for, and what came of it. Pure.

Builder and scorer run tests by the same program in the same way, so that the tests that a task names are called the
same and behave the same in both.
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

__all__ = ["Request", "Results", "command", "environment", "is_test_path", "read_results", "test_file"]

_RUNNER = Path(__file__).with_name("run_tests.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to run."""

    root: str
    """The workspace."""
    path: str
    """Where the package lies in it, for imports."""
    files: Sequence[str]
    """Of the workspace, or folders."""
    results: str
    """A file to write to."""
    only: Sequence[str] | None = None
    """Ids of tests; None: all of the files."""
    trace: bool = False
    """Write down which functions of the workspace each test enters."""
    is_configured: bool = False
    """Read the configuration of the workspace; the environment's plugins belong to it."""
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """Of every true line of results."""

    def to_json(self) -> bytes:
        """For the program's stdin."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What came of it."""

    outcomes: Mapping[str, str]
    """passed, failed, skipped, or error of what could not be collected."""
    messages: Mapping[str, str]
    """Of what failed."""
    functions: Mapping[str, frozenset[tuple[str, int]]]
    """File and first line of what each test entered, if that was asked for."""
    is_whole: bool
    """Whether the program came to its end."""
    is_true: bool
    """Whether every line was the program's own, and none was written twice."""

    def passed(self) -> frozenset[str]:
        """Ids."""
        return frozenset(name for name, outcome in self.outcomes.items() if outcome == "passed")


def command(python: Path) -> list[str]:
    """`python`: of the environment. -s: nothing is imported from a user's packages."""
    return [str(python), "-s", str(_RUNNER)]


def environment(python: Path, scratch: Path, *, has_plugins: bool = False) -> Mapping[str, str]:
    """All of it. `scratch`: for home and temporary files. `has_plugins`: let pytest load those of the environment."""
    return {
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        **({} if has_plugins else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
    }


def read_results(text: str, token: str) -> Results:
    """What the program wrote; lines of others are ignored and told."""
    outcomes, messages, functions = {}, {}, {}
    is_true, is_whole = True, False
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            assert entry["token"] == token
            name, outcome = entry["id"], entry["outcome"]
        except (ValueError, TypeError, KeyError, AssertionError):
            is_true = False
            continue
        if outcome in ("begin", "end"):
            is_whole = outcome == "end"
            continue
        is_true &= outcomes.get(name, outcome) == outcome
        outcomes[name] = outcome
        if entry.get("message"):
            messages[name] = entry["message"]
        functions[name] = frozenset((path, line) for path, line in entry.get("functions", ()))
    return Results(outcomes=outcomes, messages=messages, functions=functions, is_whole=is_whole, is_true=is_true)


def test_file(test: str) -> str:
    """The file that an id names."""
    return test.partition("::")[0]


def is_test_path(path: str) -> bool:
    """Whether a path of a workspace is restored before scoring (`scorer.restore` of the run files)."""
    parts: Iterable[str] = PurePosixPath(path).parts
    *folders, name = parts
    return (
        bool({"test", "tests"} & set(folders))
        or name == "conftest.py"
        or (name.endswith(".py") and (name.startswith("test") or name.endswith("_test.py")))
    )
