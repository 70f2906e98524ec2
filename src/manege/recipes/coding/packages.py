"""The packages whose bugs the tasks are: pinned source distributions of PyPI that carry their own tests.

Left out, however well tested, is what agents could read the whole source of elsewhere: what Python, pip, pytest, a
harness or we ourselves bring along.
"""

import tomllib
from collections.abc import Sequence
from importlib.resources import files

from pydantic import Field

from manege.errors import ConfigError
from manege.section import Section

__all__ = ["Package", "known", "select"]


class Package(Section):
    """One of them."""

    name: str
    """On PyPI."""
    version: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of its source distribution."""
    path: str = "."
    """Where it lies in that, for imports."""
    tests: list[str] = Field(default_factory=lambda: ["tests"])
    """Files or folders in that."""
    code: list[str]
    """Files or folders in which bugs are made."""
    requires: list[str] = Field(default_factory=list)
    """What package and tests need beside pytest, pinned."""

    @property
    def release(self) -> str:
        """Name and version, as in the names of tasks."""
        return f"{self.name}__{self.version}"


def known() -> Sequence[Package]:
    """All of `packages.toml`, in its order."""
    text = files("manege.recipes.coding").joinpath("packages.toml").read_text(encoding="utf-8")
    return [Package(name=name, **fields) for name, fields in tomllib.loads(text).items()]


def select(names: Sequence[str]) -> Sequence[Package]:
    """Those with these names, or all where none is given. Raises ConfigError for a name that is not known."""
    found = {package.name: package for package in known()}
    if unknown := [name for name in names if name not in found]:
        raise ConfigError(f"no package {', '.join(unknown)} in packages.toml; known are {', '.join(found)}")
    return [found[name] for name in names] if names else list(found.values())
