"""Where the builder keeps what it makes.

The folder holds `tasks.jsonl`, and per package `sources/<name>`, the release as it was published;
`environments/<name>`, Python with pytest and what the package needs, but not the package; and `made/<name>.json`, its
bugs. Agents may read `environments`, and nothing else of it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Places", "default_folder"]


def default_folder() -> Path:
    """The variable MANEGE_CODING names another place."""
    chosen = os.environ.get("MANEGE_CODING")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "manege" / "coding"


@dataclass(frozen=True, slots=True)
class Places:
    """Of one folder."""

    folder: Path

    @property
    def tasks(self) -> Path:
        """The rows of all packages."""
        return self.folder / "tasks.jsonl"

    def source(self, name: str) -> Path:
        """A package's release."""
        return self.folder / "sources" / name

    def environment(self, name: str) -> Path:
        """Its environment."""
        return self.folder / "environments" / name

    def python(self, name: str) -> Path:
        """Of its environment."""
        return self.environment(name) / "bin" / "python"

    def made(self, name: str) -> Path:
        """Its tasks so far."""
        return self.folder / "made" / f"{name}.json"
