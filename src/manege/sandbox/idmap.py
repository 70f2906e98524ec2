"""Mounts whose files belong to an attempt's user, while on the disk they stay root's: prepared workspaces are shared.

Only root can make them: `user_namespace` says who becomes whom, `mount_idmapped` shows a folder so. As a lower layer
of an overlay that is what lets the attempt's user edit a file in place. Linux 5.12, in an overlay 5.19.
https://docs.kernel.org/filesystems/idmappings.html
"""

import os
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from manege.sandbox.namespaces import CLONE_NEWUSER, map_ids
from manege.sandbox.syscalls import syscall

__all__ = ["mount_idmapped", "user_namespace"]

_AT_FDCWD, _OPEN_TREE_CLONE = -100, 1
_AT_EMPTY_PATH, _MOUNT_ATTR_IDMAP = 0x1000, 0x00100000
_MOVE_MOUNT_F_EMPTY_PATH = 0x4


@contextmanager
def user_namespace(uid: int) -> Iterator[int]:
    """The descriptor of a user namespace in which root is `uid`, with its group. /proc must be that of our PID
    namespace. Raises OSError."""
    pid = syscall("clone", CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        while True:
            signal.pause()
    try:
        map_ids(pid, inside=0, uid=uid, gid=uid)
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    try:
        yield namespace
    finally:
        os.close(namespace)


def mount_idmapped(source: str, target: str, namespace: int) -> None:
    """Show `source` at `target`, in this mount namespace, with root's files as those of `namespace`'s root. Raises
    OSError, for example EINVAL where the file system of `source` cannot do it."""
    tree = syscall("open_tree", _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    try:
        attributes = struct.pack("=4Q", _MOUNT_ATTR_IDMAP, 0, 0, namespace)
        syscall("mount_setattr", tree, b"", _AT_EMPTY_PATH, attributes, len(attributes))
        syscall("move_mount", tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)
