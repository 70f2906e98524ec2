"""Files that outlive a power cut: they are whole, or as they were before."""

import os
from pathlib import Path

__all__ = ["sync", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Replace a file at once."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have what a file holds, or which names a folder holds, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
