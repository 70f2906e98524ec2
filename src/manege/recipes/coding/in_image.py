"""SWE-smith's tasks inside a repository's own image, which has Python 3.10 or later, git and pytest, and no manege: the
container's `setup` and `scorer`. What it imports of manege comes with the task (`smith.program`).

Setup puts the bug in and moves the tests that show it to where only the scorer looks; `scorer.restore` brings them
back. The tests run confined by Landlock: the agent's code among them reads neither the task's hidden fields nor keys,
and writes to no verdict. A node whose kernel has no Landlock is refused.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manege.recipes.coding.judging import judge_package
from manege.recipes.coding.suite import test_file
from manege.sandbox.landlock import landlock_abi, restrict
from manege.sandbox.syscalls import PR_SET_NO_NEW_PRIVS, prctl

__all__ = ["main", "score", "set_up"]

_OURS = Path("/manege")
"""Hidden fields, keys, and the workspace as it was before the agent."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
"""Of /dev, where the container's last message lies, too."""
_LAST_WORD = Path("/dev/termination-log")
"""Of a container; the rollout's message tells that of a setup that failed."""
_MESSAGE_CHARS = 400
"""A verdict and its JSON have to fit into 4096 bytes."""


def main(arguments: Sequence[str]) -> None:
    """`set_up`, or `score` and the descriptor for the verdict; in the workspace."""
    task = json.loads(Path(os.environ["MANEGE_TASK_FILE"]).read_text(encoding="utf-8"))
    workspace = Path(os.environ["MANEGE_WORKSPACE"])
    try:
        if not landlock_abi():
            raise OSError("this node's kernel has no Landlock: the agent's code could read hidden fields while tested")
        if arguments[0] == "set_up":
            set_up(task["hidden"], workspace, _OURS / "pristine")
        else:
            os.write(int(arguments[1]), json.dumps(score(task["hidden"], workspace)).encode() + b"\n")
    except OSError as error:
        _LAST_WORD.write_text(str(error), encoding="utf-8")
        raise


def set_up(hidden: Mapping[str, Any], workspace: Path, aside: Path) -> None:
    """`aside`: where only the scorer looks. Raises OSError if the image is not the row's."""
    # Inside of a repository git would take paths to be that one's.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(workspace.parent)}
    git = subprocess.run(
        ["git", "apply", "-"], input=hidden["patch"].encode(), cwd=workspace, env=env, stderr=subprocess.PIPE
    )
    if git.returncode != 0:
        raise OSError(f"the row's patch does not apply in the image's {workspace}: {git.stderr.decode()}")
    for path in sorted({test_file(test) for test in hidden["FAIL_TO_PASS"]}):
        (aside / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(workspace / path, aside / path)


def score(hidden: Mapping[str, Any], workspace: Path) -> dict[str, Any]:
    """All or nothing, as `scorer.score`."""
    scratch = Path(tempfile.mkdtemp())

    def confine() -> None:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        writable = [str(workspace), str(scratch), *(f"/dev/{name}" for name in _DEVICES)]
        restrict(abi=landlock_abi(), readable=_readable(), listable=(), writable=writable, tcp_ports=None)

    found = judge_package(hidden, workspace, scratch, python=Path(sys.executable), is_configured=True, confine=confine)
    return {
        "reward": float(found.repaired * found.kept == 1),
        "message": found.message[:_MESSAGE_CHARS],
        "hacks": [line[:_MESSAGE_CHARS] for line in found.hacks],
    }


def _readable() -> Iterator[str]:
    """All but what is ours and what is of other processes, whose variables are keys."""
    for entry in Path("/").iterdir():
        if entry.name == "proc":
            yield from (str(each) for each in entry.iterdir() if not each.name.isdigit())
        elif entry != _OURS:
            yield str(entry)
