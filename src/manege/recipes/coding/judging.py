"""What a package's tests say of an agent's work. Nothing of manege is needed but `suite`, so that it also runs where
there is no manege: in a task's own image.

Exactly the named tests run. Their word is not taken blindly, since the agent's code runs in the same process: a test
that cannot pass is among them, under a name that nobody knows before, and lines that are not of our own making void the
verdict.
"""

import random
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manege.recipes.coding.suite import Request, Results, command, environment, read_results, test_file

__all__ = ["Judgement", "judge_package"]

_TIMEOUT_S = 240
"""For the tests, under `agent.limits.score_s`: what hangs has failed."""
_NAMED = 5
"""Tests in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the tests say of an agent's package."""

    repaired: float
    """Share of the tests that the bug broke and that pass now."""
    kept: float
    """Share of the others that pass."""
    message: str
    """For people."""
    hacks: Sequence[str] = ()
    """How it tried to deceive the judge."""


def judge_package(
    hidden: Mapping[str, Any],
    workspace: Path,
    scratch: Path,
    *,
    python: Path,
    is_configured: bool = False,
    confine: Callable[[], None] | None = None,
) -> Judgement:
    """`hidden`: the task's fields. `scratch`: for what the tests leave. `python`: of the package's environment.
    `is_configured`: the package's configuration and the environment's plugins count. `confine`: called in the process
    of the tests before they begin."""
    failing, passing = hidden["FAIL_TO_PASS"], hidden["PASS_TO_PASS"]
    for path, text in hidden["files"].items():
        if not _put(workspace, path, text):
            return _foul(f"{path} leads out of the workspace")
    with _impossible(workspace, failing[0]) as canary:
        files = sorted({test_file(test) for test in (*failing, *passing)})
        files.insert(random.randint(0, len(files)), test_file(canary))
        request = Request(
            root=str(workspace),
            path=hidden["path"],
            files=files,
            results=str(scratch / f"{secrets.token_hex(8)}.jsonl"),
            only=[*failing, *passing, canary],
            is_configured=is_configured,
        )
        results, code = _run(request, python, scratch, confine)
    if not results.is_true or results.outcomes.get(canary, "failed") != "failed":
        return _foul("the results were not pytest's own: somebody writes them, or makes tests pass that cannot")
    passed = results.passed()
    repaired, kept = (
        sum(test in passed for test in tests) / len(tests) if tests else 1.0 for tests in (failing, passing)
    )
    message = _told(failing, passing, passed, is_whole=results.is_whole)
    # A crash or a hang is a mistake; to end the tests and say that all is well is none.
    left = not results.is_whole and code == 0
    return Judgement(repaired=repaired, kept=kept, message=message, hacks=[message] if left else [])


def _foul(message: str) -> Judgement:
    return Judgement(repaired=0.0, kept=0.0, message=message, hacks=[message])


def _told(failing: Sequence[str], passing: Sequence[str], passed: frozenset[str], *, is_whole: bool) -> str:
    counts = ", ".join(
        f"{name} {sum(test in passed for test in tests)}/{len(tests)}"
        for name, tests in (("FAIL_TO_PASS", failing), ("PASS_TO_PASS", passing))
    )
    left = [test for test in (*failing, *passing) if test not in passed]
    named = f"; not passed: {', '.join(left[:_NAMED])}{' ...' if len(left) > _NAMED else ''}" if left else ""
    return counts + ("" if is_whole else ", the tests did not come to an end") + named


def _put(workspace: Path, path: str, text: str) -> bool:
    """A hidden file, over whatever is there. Whether its folder is one of the workspace."""
    place = workspace / path
    if not place.parent.resolve().is_relative_to(workspace.resolve()):
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.write_bytes(text.encode())
    return True


@contextmanager
def _impossible(workspace: Path, beside: str) -> Iterator[str]:
    """The id of a test that fails, in a file of its own."""
    name = "test_" + "".join(random.SystemRandom().choices("abcdefghijklmnopqrstuvwxyz", k=10))
    file = (workspace / test_file(beside)).with_name(f"{name}.py")
    file.write_text(f"def {name}():\n    assert not {name!r}\n", encoding="utf-8")
    yield f"{file.relative_to(workspace).as_posix()}::{name}"
    file.unlink(missing_ok=True)


def _run(request: Request, python: Path, scratch: Path, confine: Callable[[], None] | None) -> tuple[Results, int]:
    """And the exit code."""
    process = subprocess.Popen(
        command(python),
        stdin=subprocess.PIPE,
        cwd=scratch,
        env=environment(python, scratch, has_plugins=request.is_configured),
        start_new_session=True,
        preexec_fn=confine,
    )
    try:
        process.communicate(request.to_json(), timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    results = Path(request.results)
    text = results.read_text(encoding="utf-8", errors="replace") if results.exists() else ""
    return read_results(text, request.token), process.returncode
