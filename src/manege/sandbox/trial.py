"""Whether namespaces work here: found out by starting a program in them, which does nothing.

Containers, kernel settings and security modules each forbid another part of it, so only the whole thing tells.
"""

import os
import socket
import tempfile
from typing import NoReturn

from manege.sandbox.init import enter
from manege.sandbox.layers import Layers
from manege.sandbox.namespaces import fork_apart
from manege.sandbox.policy import Policy, apply
from manege.sandbox.spec import Limits, Overlay, ProcessSpec

__all__ = ["starts"]

_FOLDERS = ("lower", "upper", "work", "place")


def starts(layers: Layers, *, overlay: bool) -> bool:
    """Whether a program does, under these layers, with an overlay or without."""
    with tempfile.TemporaryDirectory(prefix="manege-") as folder:
        for name in _FOLDERS:
            os.mkdir(f"{folder}/{name}")
        # One fork more than it takes: this process may have threads, which `fork_apart` is not made for.
        pid = os.fork()
        if pid == 0:
            _supervise(_nothing(folder, layers, overlay=overlay))
        return os.waitpid(pid, 0)[1] == 0


def _nothing(folder: str, layers: Layers, *, overlay: bool) -> ProcessSpec:
    paths = {name: f"{folder}/{name}" for name in _FOLDERS}
    policy = Policy(
        layers=layers,
        writable=[paths["place"]],
        readable=[],
        private=[],
        tcp_ports=[],
        protected_pids=[],
        listen_port=0,
        terminals=True,
    )
    shown = Overlay(place=paths["place"], lower=[paths["lower"]], upper=paths["upper"], work=paths["work"])
    return ProcessSpec(
        program=[],
        role="trial",
        env={},
        cwd="/",
        stdout=os.devnull,
        stderr=os.devnull,
        limits=Limits(),
        policy=policy,
        overlay=shown if overlay else None,
    )


def _supervise(spec: ProcessSpec) -> NoReturn:
    code = 1
    try:
        near_end, far_end = socket.socketpair()
        pipe, child_pipe = os.pipe()
        assert spec.policy is not None
        pid = fork_apart(network=spec.policy.own_network)
        if pid == 0:
            enter(spec, code=[], lifeline=far_end.detach(), pipe=child_pipe)
            apply(spec.policy, code=[])
            os._exit(0)
        os.close(child_pipe)
        code = int(os.waitpid(pid, 0)[1] != 0 or b'"status": 0,' not in os.read(pipe, 1 << 12))
        near_end.close()
    except OSError:  # what is not allowed
        pass
    finally:
        os._exit(code)
