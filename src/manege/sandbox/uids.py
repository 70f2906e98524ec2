"""A user id of its own for each attempt, so that one is not in the reach of another's processes. Only root gives them.

An id is held by an abstract socket's name: unique among the controllers of a machine (of a network namespace), and free
again when its holder is dead, however that died. The range is one that neither people's directories (SSSD: up to
2,000,200,000), nor `/etc/subuid` (600,100,000), nor systemd's containers (1,879,048,191) use.
https://systemd.io/UIDS-GIDS/
"""

import contextlib
import errno
import itertools
import os
import random
import socket
from collections.abc import Iterable, Iterator

from manege.errors import SandboxError
from manege.sandbox.syscalls import is_linux

__all__ = ["available", "lease", "own"]

_RANGE = range(2_000_300_000, 2_000_365_536)


def available() -> bool:
    """Whether this process may become, and give files to, any user of the range: root, not in a container that has
    fewer users."""
    if not is_linux() or os.geteuid() != 0:
        return False
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            os.setresgid(*[_RANGE[0]] * 3)
            os.setresuid(*[_RANGE[0]] * 3)
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


@contextlib.contextmanager
def lease(among: range = _RANGE) -> Iterator[int]:
    """A user id, and group id, that no other attempt of this machine has. Raises SandboxError."""
    # Anywhere in the range: an id that was just given back may still own what is being removed.
    start = random.randrange(len(among))
    for uid in itertools.chain(among[start:], among[:start]):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
            try:
                holder.bind(f"\0manege-uid-{uid}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            yield uid
            return
    raise SandboxError(f"all {len(among)} user ids from {among[0]} on are in use: are so many attempts running?")


def own(paths: Iterable[str], uid: int) -> None:
    """Give folders with all that is in them to this user and its group. Raises OSError."""
    for path in paths:
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                os.chown(os.path.join(folder, name), uid, uid, follow_symlinks=False)
        os.chown(path, uid, uid)
