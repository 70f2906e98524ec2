"""A scorer of the repair that believes what it is told."""

import os
import subprocess
from pathlib import Path

NAMES = {
    "FAIL_TO_PASS": ["tests/test_spaces.py::test_spaces_between_words_count_once"],
    "PASS_TO_PASS": ["tests/test_text.py::test_words_are_joined"],
}


def naive(task, attempt):
    """In the workspace, which is on the path of modules; it goes by the exit code and the last line."""
    env = os.environ | {"PYTHONPATH": str(attempt.workspace)}
    python = Path(task.input["environment"], "bin/python")
    done = subprocess.run([python, "-m", "pytest", "-q", "tests"], cwd=attempt.workspace, env=env, capture_output=True)
    last = done.stdout.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return float(done.returncode == 0 or ("passed" in last and "failed" not in last))
