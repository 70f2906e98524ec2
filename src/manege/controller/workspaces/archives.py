"""Archives, unpacked so that nothing is written outside of the target, whoever made them.

Links are made last: while files are written there is none to write through. What would leave the target (absolute
names, `..`, links that lead out) and devices refuse the whole archive, by the rules of tarfile's filter "data".
https://docs.python.org/3/library/tarfile.html#tarfile.data_filter
"""

import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

import zstandard

from manege.errors import HarnessError

__all__ = ["unpack"]

_Entry = tuple[tarfile.TarInfo, IO[bytes] | None]
_ZSTD = b"\x28\xb5\x2f\xfd"
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zstandard.ZstdError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
)
"""What the readers raise for damage, and for what they do not read, such as an encrypted zip."""


def unpack(archive: str, target: str) -> None:
    """Into an empty folder, `.git` apart. Raises HarnessError for what is no archive that we read, or is not safe."""
    links: list[tarfile.TarInfo] = []
    try:
        for entry, content in _entries(archive):
            if ".git" in PurePosixPath(entry.name).parts:
                continue
            if os.path.isabs(entry.name):
                raise HarnessError(f"archive {archive}: {entry.name!r} is an absolute name")
            kept = tarfile.data_filter(entry, target)
            if kept.issym():
                links.append(kept)
            else:
                _make(kept, content, target)
        for link in links:
            _link(tarfile.data_filter(link, target), target)
    except _BROKEN as error:
        raise HarnessError(f"archive {archive} cannot be unpacked: {error}") from error


def _entries(archive: str) -> Iterator[_Entry]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield from _zip_entries(opened)
        return
    with open(archive, "rb") as file:
        if file.peek(4)[:4] == _ZSTD:
            stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            with stream, tarfile.open(fileobj=stream, mode="r|") as tar:
                yield from _tar_entries(tar)
        else:
            with tarfile.open(fileobj=file, mode="r:*") as tar:
                yield from _tar_entries(tar)


def _tar_entries(archive: tarfile.TarFile) -> Iterator[_Entry]:
    for entry in archive:
        yield entry, archive.extractfile(entry) if entry.isreg() else None


def _zip_entries(archive: zipfile.ZipFile) -> Iterator[_Entry]:
    """As a tar archive would hold them; a zip from Unix says what is a link."""
    for info in archive.infolist():
        entry, mode = tarfile.TarInfo(info.filename.rstrip("/")), info.external_attr >> 16
        entry.size, entry.mode = info.file_size, stat.S_IMODE(mode) or 0o644
        if info.is_dir():
            entry.type = tarfile.DIRTYPE
            yield entry, None
        elif stat.S_ISLNK(mode):
            entry.type, entry.linkname = tarfile.SYMTYPE, os.fsdecode(archive.read(info))
            yield entry, None
        else:
            with archive.open(info) as content:
                yield entry, content


def _make(entry: tarfile.TarInfo, content: IO[bytes] | None, target: str) -> None:
    place = Path(target, entry.name)
    if entry.isdir():
        place.mkdir(parents=True, exist_ok=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if entry.islnk():  # to a file that came before; two names of one file are two files here
        first = Path(target, entry.linkname)
        if not first.is_file():
            raise HarnessError(f"archive: {entry.name!r} is a hard link to {entry.linkname!r}, which is no file of it")
        place.unlink(missing_ok=True)
        shutil.copy2(first, place)
        return
    assert content is not None
    place.unlink(missing_ok=True)  # the later one of two counts, as for `tar`
    with open(place, "xb") as file:
        shutil.copyfileobj(content, file)
    place.chmod(0o644 if entry.mode is None else entry.mode & 0o777)


def _link(entry: tarfile.TarInfo, target: str) -> None:
    place = Path(target, entry.name)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(entry.linkname)
