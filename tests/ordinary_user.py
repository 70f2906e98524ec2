"""Tests again as an ordinary user, when they run as root."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest

_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def run_as_nobody(file: str, tests: str) -> str:
    """Output of pytest on those tests of a file (`-k`), by the system's interpreter if this one lies in a home folder.
    Skips where that cannot be."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv to become another user")
    system_python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for interpreter in (sys.executable, system_python):
        if subprocess.run([*_NOBODY, "sh", "-c", f"{interpreter} -c 'import json'"], check=False).returncode == 0:
            break
    else:
        pytest.skip(f"nobody may run neither {sys.executable} nor {system_python}")
    packages = [path for path in sys.path if not path.startswith(sys.base_prefix)]
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 65534, 65534)
        command = [*_NOBODY, interpreter, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={folder}/base"]
        done = subprocess.run(
            [*command, file, "-k", tests],
            env={"HOME": folder, "PYTHONPATH": os.pathsep.join(packages), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    return done.stdout + done.stderr
