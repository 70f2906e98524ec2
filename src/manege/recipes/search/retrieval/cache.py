"""A folder is built once per fingerprint, and is complete or absent.

It is written beside its place and renamed, with the sizes of its files inside, so that neither a build that was killed
nor a file that was cut off is taken for whole. Who builds holds a lock; another process waits, and finds what the first
has made.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import orjson

from manege.errors import ConfigError

__all__ = ["built_once", "fingerprint"]

_SEAL = "sizes.json"


def fingerprint(files: Iterable[Path], *facts: str) -> str:
    """Of the files' content and kind, in their order, and of `facts`; their names do not matter."""
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=8)
    for path in files:
        with path.open("rb") as file:
            digest.update("".join(path.suffixes).encode() + hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def built_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Return when `folder` is what `build` has written, now or before. Raises ConfigError when the disk refuses."""
    aside = folder.with_name(f".{folder.name}.unfinished")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_complete(folder):
                return
            for path in (aside, folder):
                shutil.rmtree(path, ignore_errors=True)
            aside.mkdir()
            try:
                build(aside)
                _seal(aside)
                aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot build {folder}: {error}; make room there, or choose another --index-folder"
        ) from error


def _seal(folder: Path) -> None:
    (folder / _SEAL).write_bytes(orjson.dumps({path.name: path.stat().st_size for path in folder.iterdir()}))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _is_complete(folder: Path) -> bool:
    try:
        sizes = orjson.loads((folder / _SEAL).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, orjson.JSONDecodeError):
        return False
