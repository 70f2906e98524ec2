"""What a prepared workspace costs: to make it, to find it again, and per attempt as an overlay or as a copy.

    python benchmarks/workspaces.py [--files 2000] [--megabytes 200] [--attempts 50]

The workspace is a folder of random files, half of its bytes in ten large ones. `find` is a preparation that is there
already: the folder is looked through for changes. `attempts` begin together, each is a sandboxed shell that reads one
file, changes it and deletes another; seconds per attempt, from placing the workspace to the end of the last process,
and megabytes on disk when all have ended, the one preparation included. Prints JSON.
"""

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from manege.config import WorkspaceConfig
from manege.controller.folders import AttemptFolders, make_folders
from manege.controller.workspaces.cache import Workspaces
from manege.sandbox.launcher import Launcher
from manege.sandbox.layers import Layers
from manege.sandbox.policy import Policy
from manege.sandbox.probe import probe
from manege.sandbox.spec import Limits, Overlay, ProcessSpec
from manege.types import Rollout, RolloutId, RolloutSpec, RolloutState, RunId, Task

TASK = Task(id="t", input={})
WORK = "cat d0/f0 > /dev/null; echo changed >> d0/f0; rm d1/f1"


def write_template(folder: Path, num_files: int, megabytes: int) -> None:
    """Ten large files and many small ones in a hundred folders."""
    for number in range(num_files):
        path = folder / f"d{number % 100}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom((megabytes << 19) // num_files))
    for number in range(10):
        (folder / f"large{number}").write_bytes(os.urandom((megabytes << 19) // 10))


def megabytes_on_disk(*folders: Path) -> float:
    """As `du` counts."""
    num_bytes = sum(path.lstat().st_blocks * 512 for folder in folders for path in folder.rglob("*"))
    return round(num_bytes / 2**20, 1)


def request(folders: AttemptFolders, overlay: Overlay | None, layers: Layers) -> ProcessSpec:
    """The sandboxed shell."""
    return ProcessSpec(
        program=["sh", "-ec", WORK],
        role="agent",
        env={"PATH": "/usr/bin:/bin", "HOME": str(folders.home), "TMPDIR": str(folders.scratch)},
        cwd=str(folders.workspace),
        stdout=str(folders.logs / "stdout.txt"),
        stderr=str(folders.logs / "stderr.txt"),
        limits=Limits(),
        policy=Policy(
            layers=layers,
            writable=[str(path) for path in (folders.workspace, folders.home, folders.scratch)],
            readable=[],
            private=[],
            tcp_ports=[],
            protected_pids=[],
        ),
        overlay=overlay,
    )


async def measure(folder: Path, arguments: argparse.Namespace, launcher: Launcher) -> dict[str, object]:
    """Seconds and megabytes."""
    template = folder / "template"
    write_template(template, arguments.files, arguments.megabytes)
    workspaces, config = Workspaces(folder / "prepared", launcher), WorkspaceConfig(source=str(template))
    figures: dict[str, object] = {}
    began_s = time.perf_counter()
    subprocess.run(["cp", "-r", template, folder / "copied"], check=True)
    figures["cp -r"] = round(time.perf_counter() - began_s, 3)
    for name in ("make", "find"):
        began_s = time.perf_counter()
        async with workspaces.prepare(config, TASK, timeout_s=600):
            figures[name] = round(time.perf_counter() - began_s, 3)
    for name, layers in (("overlay", probe()), ("copy", replace(probe(), overlay=False))):
        if name == "overlay" and not layers.overlay:
            continue
        home = folder / name

        async def attempt(number: int, home: Path = home, layers: Layers = layers) -> float:
            began_s = time.perf_counter()
            spec = RolloutSpec(id=RolloutId(f"r{number}"), run=RunId("run"), task=TASK)
            folders = make_folders(home, Rollout(spec=spec, state=RolloutState.RUNNING, attempt=0, created_s=0))
            async with workspaces.prepare(config, TASK, timeout_s=600) as prepared:
                overlay = await workspaces.place(prepared, folders, layers, timeout_s=600)
                ended = await launcher.run(request(folders, overlay, layers), 600)
            assert ended.code == 0, (folders.logs / "stderr.txt").read_text()
            return time.perf_counter() - began_s

        alone_s = await attempt(0)
        began_s = time.perf_counter()
        await asyncio.gather(*[attempt(number) for number in range(1, arguments.attempts + 1)])
        figures[name] = {
            "one alone": round(alone_s, 3),
            "all": round(time.perf_counter() - began_s, 3),
            "megabytes": megabytes_on_disk(home, folder / "prepared"),
        }
    return figures


async def main() -> None:
    """Measure in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--attempts", type=int, default=50)
    arguments = parser.parse_args()
    launcher = Launcher()
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures = await measure(Path(folder), arguments, launcher)
        finally:
            await launcher.close()
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
