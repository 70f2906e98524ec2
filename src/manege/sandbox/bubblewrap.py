"""Namespaces by way of bubblewrap, where this user may not make any and `bwrap` may: it is installed with rights, or a
security module trusts it by name.

The supervisor's child becomes `bwrap`, which makes the same root as `root.build` would and starts `boxed` as the first
process of the namespaces. What that needs crosses in a file without a name; all else is closed.
https://github.com/containers/bubblewrap
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import manege
from manege.sandbox.init import HOST_NAME, layout
from manege.sandbox.namespaces import INSIDE_ID
from manege.sandbox.root import Access, Place
from manege.sandbox.spec import ProcessSpec

__all__ = ["Boxed", "available", "enter"]

_TRIAL = ["--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "true"]
_TRIAL_S = 10
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from manege.sandbox.boxed import main; "
_BOOT += "main(int(sys.argv[1]))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxed:
    """What the first process inside is told; the numbers are descriptors that it inherits."""

    spec: ProcessSpec
    code: Sequence[str]
    listable: Sequence[str]
    lifeline: int
    pipe: int
    reply: int | None
    """None: nothing is answered."""
    channel: int | None


def available() -> bool:
    """Found out by running a program in it."""
    bwrap = shutil.which("bwrap", path=os.defpath)
    if bwrap is None:
        return False
    try:
        return subprocess.run([bwrap, *_TRIAL], capture_output=True, timeout=_TRIAL_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def enter(boxed: Boxed) -> NoReturn:
    """Become bubblewrap, whose descriptors are those of `boxed` and the standard streams. Raises OSError."""
    policy = boxed.spec.policy
    assert policy is not None
    code = [*boxed.code, os.path.dirname(manege.__file__)]
    places, links, files = layout(policy, code, boxed.spec.env)
    arguments = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--as-pid-1", "--die-with-parent"]
    arguments += ["--unshare-net"] if policy.own_network else []
    arguments += ["--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID), "--hostname", HOST_NAME, "--cap-drop", "ALL"]
    arguments += [word for place in places for word in _shown(place)]
    arguments += [word for path, target in links.items() for word in ("--symlink", target, path)]
    arguments += [word for path, text in files.items() for word in ("--file", str(_file(text.encode())), path)]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/", "--chdir", "/"]
    request = _file(pickle.dumps(boxed))
    for descriptor in (boxed.lifeline, boxed.pipe, boxed.reply, boxed.channel):
        if descriptor is not None:
            os.set_inheritable(descriptor, True)
    python = [sys.executable, "-P", "-c", _BOOT, str(request), json.dumps(sys.path)]
    os.execvpe("bwrap", ["bwrap", *arguments, "--", *python], {"PATH": os.defpath, "LANG": "C.UTF-8"})


def _shown(place: Place) -> Iterable[str]:
    if place.access is Access.READ:
        return ["--ro-bind", place.source, place.path]
    if place.access is Access.WRITE:
        return ["--bind", place.source, place.path]
    if os.path.isdir(place.path):
        return ["--perms", "0111", "--tmpfs", place.path, "--remount-ro", place.path]
    return ["--perms", "0000", "--ro-bind-data", str(_file(b"")), place.path]


def _file(content: bytes) -> int:
    """The descriptor of a file without a name, to be read from its beginning by who inherits it."""
    descriptor = os.memfd_create("boxed", 0)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
