"""Limits of one process of an agent; descendants inherit them.

The number of processes is not here: RLIMIT_NPROC counts all processes of a user, and root is exempt, so the supervisor
counts them.
"""

import resource

from manege.sandbox.spec import Limits
from manege.sandbox.syscalls import is_linux

__all__ = ["set_limits"]


def set_limits(limits: Limits) -> None:
    """Limit this process; never above what it has already."""
    _set(resource.RLIMIT_CORE, 0)
    if is_linux():  # macOS refuses to limit the address space
        _set(resource.RLIMIT_AS, limits.memory_bytes)
    _set(resource.RLIMIT_FSIZE, limits.file_bytes)
    _set(resource.RLIMIT_NOFILE, limits.num_files)


def _set(kind: int, value: int | None) -> None:
    if value is None:
        return
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))
