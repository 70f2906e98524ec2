"""Source and environment of a package, made once: downloaded by pip, checked by hash, installed in pinned versions.

What is done is not done again: a folder has its name only when it is whole.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from manege.errors import HarnessError
from manege.recipes.coding.packages import Package
from manege.recipes.coding.places import Places

__all__ = ["prepare"]

_BACKENDS = (
    "pip==26.3", "setuptools==84.2.1", "wheel==0.48.0", "setuptools-scm==10.3.4", "hatchling==1.33.0",
    "hatch-vcs==0.5.0", "flit-core==4.2.0", "poetry-core==2.5.0", "pdm-backend==2.5.0",
)  # fmt: skip
"""pip asks the build system of a source distribution for its name before it keeps it."""
_PYTEST = ("pytest==9.2.0", "iniconfig==2.3.1", "packaging==26.4", "pluggy==1.7.0", "pygments==2.21.0")
_TIMEOUT_S = 600
_FIND = """
import pathlib, sys
for folder in (pathlib.Path.cwd(), *pathlib.Path.cwd().parents):
    if (folder / "PKG-INFO").is_file():
        sys.path.append(str(folder / {path!r}))
        break
"""
"""Makes Python find the package of the workspace that it is started in."""


def prepare(package: Package, places: Places) -> None:
    """Raises HarnessError with what pip said."""
    _make(places.folder / "tools", lambda folder: _install(folder, _BACKENDS))
    _make(places.source(package.name), lambda folder: _unpack(package, places, folder))
    _make(places.environment(package.name), lambda folder: _install_environment(package, folder))


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    """A virtual environment knows its own path, so it is made in place, and marked when it is whole."""
    mark = folder.with_name(f"{folder.name}.ready")
    if mark.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fill(folder)
    mark.touch()


def _install(folder: Path, requirements: Sequence[str]) -> None:
    _call([sys.executable, "-m", "venv", str(folder)])
    _call([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirements])


def _install_environment(package: Package, folder: Path) -> None:
    _call([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    pip = str(folder.parents[1] / "tools" / "bin" / "pip")
    _call([pip, "--python", str(folder / "bin" / "python"), "install", "--quiet", *_PYTEST, *package.requires])
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "package_of_workspace.py").write_text(_FIND.format(path=package.path), encoding="utf-8")
    (packages / "package_of_workspace.pth").write_text("import package_of_workspace\n", encoding="utf-8")


def _unpack(package: Package, places: Places, folder: Path) -> None:
    with TemporaryDirectory() as scratch:
        pip = str(places.folder / "tools" / "bin" / "pip")
        wanted = f"{package.name}=={package.version}"
        options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", scratch]
        _call([pip, "download", "--quiet", *options, wanted])
        (archive,) = Path(scratch).iterdir()
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != package.sha256:
            raise HarnessError(f"{archive.name} has the SHA-256 {found}, want {package.sha256}; it was exchanged")
        with tarfile.open(archive) as tar:
            tar.extractall(Path(scratch, "unpacked"), filter="data")
        (root,) = Path(scratch, "unpacked").iterdir()
        for entry in root.iterdir():
            shutil.move(entry, folder / entry.name)


def _call(words: Sequence[str]) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"{' '.join(words)}: {error}") from error
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise HarnessError(f"{' '.join(words)} failed with exit code {done.returncode}:\n{said}")
