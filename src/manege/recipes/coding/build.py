"""Build coding tasks from real packages: `python -m manege.recipes.coding.build`.

In: `packages.toml` and a seed. Out: `tasks.jsonl` in the folder, a row per task in the columns of SWE-smith, the same
for the same seed byte for byte. What is done is kept per package: a second call goes on, or only adds what is missing.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import zstandard

from manege.errors import ManegeError
from manege.recipes.coding.bench import Bench
from manege.recipes.coding.packages import Package, select
from manege.recipes.coding.places import Places, default_folder
from manege.recipes.coding.prepare import prepare
from manege.recipes.coding.statement import describe
from manege.recipes.coding.validate import Bug, examine, find_bugs
from manege.sandbox.launcher import Launcher
from manege.sandbox.probe import probe

__all__ = ["build", "main", "row", "take_shipped"]

_TRIES = 8
"""Bugs tried for each one that is wanted, at most."""
_PER_FUNCTION = 2
"""Tasks."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m manege.recipes.coding.build", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=default_folder(), help="default: %(default)s")
    parser.add_argument("--packages", default="", metavar="A,B", help="only these")
    parser.add_argument("--per-package", type=int, default=12, metavar="N", help="tasks (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shipped", action="store_true", help="prepare the packages, and take the tasks made for you")
    arguments = parser.parse_args()
    try:
        packages = select([name for name in arguments.packages.split(",") if name])
        places = Places(arguments.folder.absolute())
        if arguments.shipped:
            take_shipped(places, packages)
        else:
            asyncio.run(build(places, packages, arguments.per_package, arguments.seed))
    except ManegeError as error:
        sys.exit(f"build: {error}")


async def build(places: Places, packages: Sequence[Package], per_package: int, seed: int) -> Sequence[Mapping]:
    """The rows, which are also written. A package that fails is told and left out. Raises ManegeError if all fail."""
    launcher = Launcher()
    rows, failures = [], []
    try:
        bench = Bench(launcher=launcher, layers=probe(), places=places)
        for package in packages:
            try:
                bugs = await _bugs(bench, package, per_package, seed)
                released = _released(places.source(package.name))
                rows += [row(package, bug, released) for bug in bugs]
            except ManegeError as error:
                print(f"{package.name}: {error}", file=sys.stderr)
                failures.append(error)
    finally:
        await launcher.close()
    if failures and not rows:
        raise failures[0]
    _write(places.tasks, "".join(json.dumps(each) + "\n" for each in rows))
    print(f"{len(rows)} tasks from {len({each['repo'] for each in rows})} packages in {places.tasks}")
    return rows


def take_shipped(places: Places, packages: Sequence[Package]) -> None:
    """What `build` made of these packages with seed 0, without trying a bug again. Raises HarnessError."""
    text = zstandard.decompress(files("manege.recipes.coding").joinpath("tasks.jsonl.zst").read_bytes()).decode()
    wanted = {f"pypi/{package.release}": package for package in packages}
    lines = [line for line in text.splitlines(keepends=True) if json.loads(line)["repo"] in wanted]
    for repo in dict.fromkeys(json.loads(line)["repo"] for line in lines):
        prepare(wanted[repo], places)
    _write(places.tasks, "".join(lines))
    print(f"{len(lines)} tasks in {places.tasks}")


def row(package: Package, bug: Bug, released: str) -> Mapping[str, str | list[str]]:
    """A task in SWE-smith's columns (https://huggingface.co/datasets/SWE-bench/SWE-smith)."""
    digest = hashlib.sha256(bug.patch.encode()).hexdigest()[:8]
    return {
        "instance_id": f"{package.release}.{bug.kind}__{digest}",
        "repo": f"pypi/{package.release}",
        "patch": bug.patch,
        "FAIL_TO_PASS": list(bug.failing),
        "PASS_TO_PASS": list(bug.passing),
        "image_name": "",
        "problem_statement": describe(package, bug),
        "created_at": released,
    }


async def _bugs(bench: Bench, package: Package, per_package: int, seed: int) -> Sequence[Bug]:
    """Those that were found before, and now; kept one by one."""
    made = bench.places.made(package.name)
    known = json.loads(made.read_text(encoding="utf-8")) if made.exists() else {}
    if (known.get("version"), known.get("seed")) != (package.version, seed):
        known = {"version": package.version, "seed": seed, "num_tried": 0, "bugs": []}
    bugs, num_tried = [Bug(**fields) for fields in known["bugs"]], known["num_tried"]
    if len(bugs) >= per_package or num_tried >= _TRIES * per_package or known.get("is_exhausted"):
        return bugs[:per_package]
    began_s = time.monotonic()
    await asyncio.to_thread(prepare, package, bench.places)
    healthy = await examine(bench, package)
    async for bug in find_bugs(bench, package, healthy, seed=seed, after=num_tried):
        num_tried += 1
        if bug is not None and sum(each.function == bug.function for each in bugs) < _PER_FUNCTION:
            bugs.append(bug)
        kept = {**known, "flaky": healthy.flaky, "num_tried": num_tried, "bugs": [asdict(bug) for bug in bugs]}
        _write(made, json.dumps(kept))
        if len(bugs) == per_package or num_tried == _TRIES * per_package:
            break
    else:
        _write(made, json.dumps({**json.loads(made.read_text(encoding="utf-8")), "is_exhausted": True}))
    print(
        f"{package.name} {package.version}: {len(bugs)} tasks of {num_tried} bugs, {len(healthy.tests)} tests in "
        f"{healthy.seconds:.1f} s, {len(healthy.flaky)} flaky, {(time.monotonic() - began_s) / 60:.1f} minutes",
        flush=True,
    )
    return bugs


def _write(file: Path, text: str) -> None:
    """All of it, or nothing."""
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def _released(source: Path) -> str:
    """When the newest file of a release is from."""
    newest = max(file.stat().st_mtime for file in source.rglob("*") if file.is_file())
    return datetime.fromtimestamp(int(newest), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    main()
