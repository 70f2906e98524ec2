"""Which bugs make tasks: those that break some tests of a package, keep the rest, and do so every time.

First the suite is run as it is, twice: tests that do not pass both times belong to no task. The first run sees which
functions each test enters. A bug is tried on the tests that enter its function; if some fail, on the whole suite, which
must say the same of these, and that all others pass.
"""

import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from manege.errors import HarnessError
from manege.recipes.coding import patches
from manege.recipes.coding.bench import Bench
from manege.recipes.coding.mutate import Mutation, mutations
from manege.recipes.coding.packages import Package
from manege.recipes.coding.suite import is_test_path, test_file

__all__ = ["Bug", "Healthy", "examine", "find_bugs"]

_FIRST_S = 300.0
"""For a suite whose time is not known."""
_MOST_BROKEN = 0.5
"""A bug that breaks more than this part of the tests is no riddle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """A package as it was published."""

    tests: Sequence[str]
    """That pass every time, by id."""
    flaky: Sequence[str]
    """That passed once."""
    entering: Mapping[tuple[str, int], Sequence[str]]
    """Tests by the functions that they enter: file and first line."""
    seconds: float
    """Of the whole suite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A mutation that makes a task; kept as JSON."""

    kind: str
    patch: str
    """Puts it into the source."""
    function: str
    """By its path and name."""
    docstring: str
    failing: Sequence[str]
    """Tests that it breaks."""
    passing: Sequence[str]
    """Tests that it leaves."""
    messages: Mapping[str, str]
    """Of the failing ones."""


async def examine(bench: Bench, package: Package) -> Healthy:
    """Raises HarnessError for a suite that cannot be run."""
    first = await bench.run(package, trace=True, timeout_s=_FIRST_S)
    passed = sorted(first.passed()) if first else []
    passed = [test for test in passed if is_test_path(test_file(test))]
    began_s = time.monotonic()
    second = await bench.run(package, only=passed, timeout_s=_FIRST_S) if passed else None
    if first is None or second is None:
        raise HarnessError(f"the tests of {package.name} {package.version} do not come to an end, or none passes")
    tests = [test for test in passed if second.outcomes.get(test) == "passed"]
    entering = defaultdict[tuple[str, int], list[str]](list)
    for test in tests:
        for function in first.functions[test]:
            entering[function].append(test)
    return Healthy(
        tests=tests,
        flaky=sorted(set(passed) - set(tests)),
        entering=entering,
        seconds=time.monotonic() - began_s,
    )


async def find_bugs(
    bench: Bench, package: Package, healthy: Healthy, *, seed: int, after: int
) -> AsyncIterator[Bug | None]:
    """One for each that was tried, in an order of its own for each seed; None: it makes no task. `after`: so many that
    were tried before."""
    for path, mutation in _order(bench, package, healthy, seed)[after:]:
        before = (bench.places.source(package.name) / path).read_bytes().decode()
        try:
            text = mutation.of(before)
        except (SyntaxError, ValueError):
            text = before
        yield None if text == before else await _try(bench, package, healthy, path, mutation, before, text)


def _order(bench: Bench, package: Package, healthy: Healthy, seed: int) -> Sequence[tuple[str, Mutation]]:
    """Of each function each kind at most once, the functions in turns."""
    rng = random.Random(f"{seed}:{package.release}")
    found = defaultdict[tuple[str, str, str], list[Mutation]](list)
    root = bench.places.source(package.name)
    for code in package.code:
        for file in sorted([root / code] if code.endswith(".py") else (root / code).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if is_test_path(path):
                continue
            for mutation in mutations(file.read_bytes().decode()):
                if (path, mutation.function.first_line) in healthy.entering:
                    found[path, mutation.function.name, mutation.kind].append(mutation)
    chosen = [(path, rng.choice(made)) for (path, _, _), made in sorted(found.items())]
    rng.shuffle(chosen)
    turn = defaultdict[tuple[str, str], int](int)
    ordered = []
    for path, mutation in chosen:
        turn[path, mutation.function.name] += 1
        ordered.append((turn[path, mutation.function.name], len(ordered), path, mutation))
    return [(path, mutation) for _, _, path, mutation in sorted(ordered, key=lambda entry: entry[:2])]


async def _try(
    bench: Bench, package: Package, healthy: Healthy, path: str, mutation: Mutation, before: str, after: str
) -> Bug | None:
    limit_s, changed = 10 + 5 * healthy.seconds, {path: after}
    entering = healthy.entering[path, mutation.function.first_line]
    quick = await bench.run(package, changed=changed, only=entering, timeout_s=limit_s)
    failing = [test for test in entering if quick and quick.outcomes.get(test) == "failed"]
    if not failing or len(failing) > _MOST_BROKEN * len(healthy.tests):
        return None
    whole = await bench.run(package, changed=changed, only=healthy.tests, timeout_s=limit_s)
    passing = [test for test in healthy.tests if test not in failing]
    if whole is None or whole.outcomes != dict.fromkeys(failing, "failed") | dict.fromkeys(passing, "passed"):
        return None
    return Bug(
        kind=mutation.kind,
        patch=patches.make(path, before, after),
        function=f"{path}:{mutation.function.name}",
        docstring=mutation.function.docstring,
        failing=failing,
        passing=passing,
        messages={test: whole.messages.get(test, "") for test in failing},
    )
