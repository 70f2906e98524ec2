"""Which files a program consists of: what a sandbox must let it read, however private the folder that they lie in.

Only code is found, never data beside it: task files with hidden answers often lie there too.
"""

import importlib.util
import itertools
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence

__all__ = ["command_paths", "imported_paths", "interpreter_paths"]

_SOURCE_SUFFIXES = (".py", ".sh", ".js", ".mjs", ".cjs", ".ts", ".rb", ".pl")


def interpreter_paths() -> Sequence[str]:
    """Where this Python and its packages live, which may be below a home folder or in the project's folder."""
    return sorted({sys.prefix, sys.base_prefix, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def imported_paths() -> Sequence[str]:
    """Code outside the interpreter that this process has imported: packages as folders, single modules as files."""
    covered = [path + os.sep for path in interpreter_paths()]
    found: list[str] = []
    modules = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
    for module in sorted(modules, key=lambda module: str(module.__file__)):
        location = str(module.__file__)
        if not location.startswith(tuple(covered)):
            path = os.path.dirname(location) if hasattr(module, "__path__") else location
            found.append(path)
            covered.append(path + os.sep)
    return found


def command_paths(argv: Sequence[str], search_path: str, *, home: str) -> tuple[Sequence[str], Sequence[str]]:
    """The code of a command, to read: its executable, arguments that are absolute paths of files, packages after `-m`;
    and the folders that scripts and packages lie in, to list: an import looks names up there. A script that lies in the
    folder `home` itself, or above it, stands alone."""
    executable = shutil.which(argv[0], path=search_path)
    files = [executable, *(argument for argument in argv[1:] if os.path.isabs(argument))]
    readable = [os.path.realpath(file) for file in files if file and os.path.isfile(file)]
    packages = [path for flag, name in itertools.pairwise(argv) if flag == "-m" for path in _package_paths(name)]
    scripts = [path for path in readable if path.endswith(_SOURCE_SUFFIXES)]
    inside_home = os.path.realpath(home) + os.sep
    scripts = [path for path in scripts if not inside_home.startswith(os.path.dirname(path) + os.sep)]
    beside = [path for script in scripts for path in _code_beside(script)]
    return [*readable, *packages, *beside], [os.path.dirname(path) for path in [*scripts, *packages]]


def _package_paths(name: str) -> Sequence[str]:
    """Where a package or module is installed, for example in a folder that is being developed."""
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    return list(spec.submodule_search_locations or ([spec.origin] if spec.has_location and spec.origin else []))


def _code_beside(script: str) -> Iterator[str]:
    """What a script may import: files of its kind and packages."""
    suffix = os.path.splitext(script)[1]
    for entry in os.scandir(os.path.dirname(script)):
        if entry.name.endswith(suffix) or os.path.isfile(os.path.join(entry.path, "__init__" + suffix)):
            yield entry.path
