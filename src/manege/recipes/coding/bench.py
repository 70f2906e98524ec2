"""Runs a package's tests, in the sandbox that agents get: a mutant may do anything.

In: a package, files of it that are changed, what to run. Out: results, or None where the tests did not come to an end.
Each run has a copy of the source of its own, which goes afterwards.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from manege.recipes.coding.packages import Package
from manege.recipes.coding.places import Places
from manege.recipes.coding.suite import Request, Results, command, environment, read_results, test_file
from manege.sandbox.launcher import Launcher
from manege.sandbox.layers import Layers
from manege.sandbox.policy import Policy
from manege.sandbox.spec import Limits, ProcessSpec

__all__ = ["Bench"]

_LIMITS = Limits(memory_bytes=4 << 30, file_bytes=256 << 20, num_processes=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Of one builder."""

    launcher: Launcher
    layers: Layers
    places: Places

    async def run(
        self,
        package: Package,
        *,
        changed: Mapping[str, str] | None = None,
        only: Sequence[str] | None = None,
        trace: bool = False,
        timeout_s: float,
    ) -> Results | None:
        """`changed`: texts by path; `only`, `trace`: see `Request`. Raises HarnessError."""
        with TemporaryDirectory(prefix="manege-bench-") as folder:
            workspace, scratch, python = (
                Path(folder, "workspace"),
                Path(folder, "scratch"),
                self.places.python(package.name),
            )
            shutil.copytree(self.places.source(package.name), workspace, symlinks=True)
            scratch.mkdir()
            for path, text in (changed or {}).items():
                (workspace / path).write_bytes(text.encode())
            request = Request(
                root=str(workspace),
                path=package.path,
                files=package.tests if only is None else sorted({test_file(test) for test in only}),
                results=str(scratch / "results.jsonl"),
                only=only,
                trace=trace,
            )
            spec = ProcessSpec(
                program=command(python),
                role="scorer",
                env=environment(python, scratch),
                cwd=str(scratch),
                stdout=str(Path(folder, "stdout")),
                stderr=str(Path(folder, "stderr")),
                limits=_LIMITS,
                policy=Policy(
                    layers=self.layers,
                    writable=[str(workspace), str(scratch)],
                    readable=[str(self.places.environment(package.name))],
                    private=[],
                    tcp_ports=[],
                    protected_pids=[os.getpid()],
                ),
                stdin=request.to_json(),
            )
            await self.launcher.run(spec, timeout_s)
            written = Path(request.results)
            text = written.read_text(encoding="utf-8", errors="replace") if written.exists() else ""
            results = read_results(text, request.token)
            return results if results.is_whole else None
