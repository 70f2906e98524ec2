"""An overlay: folders that are never written, seen with the changes of one process tree.

Marks of what was removed or replaced lie in attributes that every user may set (`userxattr`), so that root and others
leave the same layers behind. https://docs.kernel.org/filesystems/overlayfs.html
"""

import os

from manege.sandbox.idmap import mount_idmapped, user_namespace
from manege.sandbox.mounts import mount
from manege.sandbox.spec import Overlay

__all__ = ["mount_overlay"]


def mount_overlay(overlay: Overlay, *, uid: int | None = None) -> None:
    """In a mount namespace of this process's own. `uid`: who is shown as the owner of root's files. Raises OSError."""
    if uid is not None:
        mount("proc", "/proc")  # of our PID namespace
        with user_namespace(uid) as namespace:
            for path in overlay.lower:
                if os.stat(path).st_uid == 0:
                    mount_idmapped(path, path, namespace)
    lower = ":".join(_escaped(path, r"\:,") for path in overlay.lower)
    upper, work = (_escaped(path, r"\,") for path in (overlay.upper, overlay.work))
    try:
        mount("overlay", overlay.place, f"lowerdir={lower},upperdir={upper},workdir={work},userxattr")
    except OSError as error:
        raise OSError(error.errno, f"overlay at {overlay.place}: {error.strerror}") from error


def _escaped(path: str, special: str) -> str:
    """The kernel's own syntax for characters that separate options and layers."""
    return "".join("\\" + character if character in special else character for character in path)
