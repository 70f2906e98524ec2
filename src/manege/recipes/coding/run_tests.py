"""Run tests of a package and write down what each came to. A program of its own, for the Python of the package's
environment; it needs pytest and nothing of manege.

In: a request on stdin (`suite.Request`). Out: one JSON line per test in the file that it names, each with the token of
the request, as tests end, so that those before a crash or a hang are known; then a line "end". Configuration files of
the package are only read if the request says so; whether plugins are loaded, the environment says.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

_MESSAGE_CHARS = 400


class Report:
    """What pytest tells, as lines."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._token, self._only, self._trace = request["token"], request["only"], request["trace"]
        self._root = request["root"] + os.sep
        self._results = Path(request["results"])
        self._outcome, self._message = "passed", ""
        self._functions = set[tuple[str, int]]()

    def write(self, name: str, outcome: str, **more: object) -> None:
        """A line."""
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"token": self._token, "id": name, "outcome": outcome, **more}) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the wanted ones."""
        if self._only is not None:
            wanted = set(self._only)
            items[:] = [item for item in items if item.nodeid in wanted]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Of a file or folder."""
        if report.failed:
            self.write(report.nodeid, "error", message=_message(report))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Around a test with all that belongs to it."""
        self._outcome, self._message = "passed", ""
        self._functions.clear()
        if self._trace:
            sys.setprofile(self._see)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            more = {"functions": sorted(self._functions)} if self._trace else {}
            self.write(item.nodeid, self._outcome, message=self._message, **more)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of its beginning, itself and its end."""
        if report.failed:
            self._outcome, self._message = "failed", self._message or _message(report)
        elif (report.skipped or hasattr(report, "wasxfail")) and self._outcome == "passed":
            self._outcome = "skipped"

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._root):
            self._functions.add((code.co_filename[len(self._root) :], code.co_firstlineno))


def _message(report: pytest.CollectReport | pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr).strip().rpartition("\n")[2]
    return text[:_MESSAGE_CHARS]


def main() -> None:
    """The program."""
    del sys.path[0]  # this file's folder; Python 3.10 has no option for it
    request = json.load(sys.stdin)
    root = request["root"]
    os.chdir(root)
    # Behind the standard library and pytest: nothing in the workspace takes the place of those.
    sys.path.append(str(Path(root, request["path"])))
    report = Report(request)
    report.write("", "begin")
    options = ["-q", "--rootdir", root]
    if request["is_configured"]:
        # Not in processes of xdist's own, which would tell us nothing.
        options += ["-n0"] if importlib.util.find_spec("xdist") else []
    else:
        settings = Path(request["results"]).with_name("settings.ini")
        settings.write_text("[pytest]\n", encoding="utf-8")
        options += ["-c", str(settings), "-p", "no:cacheprovider", "-p", "no:junitxml"]
    code = pytest.main([*options, *request["files"]], plugins=[report])
    report.write("", "end", code=int(code))


if __name__ == "__main__":
    main()
