"""The warm parent: a small clean process that imports a program once and forks it per attempt.

In: requests on a control socket (one byte, with two descriptors: a file that holds a pickled ProcessSpec, and the
lifeline). Out: a supervisor per request; the parent itself never runs agent code but the import. It holds no secret,
no other socket and no thread, so that a fork of it is safe and gives nothing away. It ends with its control socket.
"""

import contextlib
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NoReturn

from manege.errors import HarnessError
from manege.programs import import_function
from manege.sandbox import cgroups
from manege.sandbox.child import Function, run_child
from manege.sandbox.code import imported_paths, interpreter_paths
from manege.sandbox.namespaces import fork_apart
from manege.sandbox.spec import Exit, ProcessSpec
from manege.sandbox.supervisor import report, supervise
from manege.sandbox.warmup import warm_up
from manege.sandbox.watch import Watcher, suspects_of

__all__ = ["main"]


def main(control_descriptor: int, program: str, role: str, preload: Sequence[str]) -> None:
    """Serve until the control socket closes. `program`: `module:function`, or empty to serve commands.

    The first line sent back is empty, or says why the program cannot be imported.
    """
    control = socket.socket(fileno=control_descriptor)
    try:
        function = _load(program, role, preload)
    except HarnessError as error:
        control.sendall(str(error).encode())
        return
    code = [*interpreter_paths(), *(imported_paths() if function else [])]
    cgroups.remove_leftovers()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are reaped by the kernel
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    control.sendall(b"\n")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _supervise(function, code, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _load(program: str, role: str, preload: Sequence[str]) -> Function | None:
    if not program:
        return None
    for name in preload:
        importlib.import_module(name)
    try:
        function = import_function(program, what=role)
    except HarnessError:
        raise
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise HarnessError(
            f"{role} program {program!r} fails while it is imported ({type(error).__name__}: {error}); what it takes "
            "from the environment must be read inside the function, which is called once per rollout"
        ) from error
    if threading.active_count() > 1:
        raise HarnessError(f"{role} program {program!r} starts threads while it is imported; run it as a command")
    warm_up(set(sys.modules))
    return function


def _supervise(function: Function | None, code: Sequence[str], request: int, lifeline_descriptor: int) -> NoReturn:
    lifeline = socket.socket(fileno=lifeline_descriptor)
    try:
        with os.fdopen(request, "r+b", buffering=0) as file:
            spec: ProcessSpec = pickle.loads(file.readall())
            file.truncate(0)
            file.seek(0)
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            outputs = [os.open(path, flags, 0o600) for path in (spec.stdout, spec.stderr)]
            ended = _run(spec, function, code, outputs, file.fileno(), lifeline)
            file.seek(0)
            ended = replace(ended, reply=file.readall().decode("utf-8", "replace") or None)
    except OSError as error:
        message = f"{type(error).__name__}: {error}"
        ended = Exit(code=None, signal=None, cpu_seconds=0, num_left=0, error=message)
    with contextlib.suppress(OSError):  # the controller may be gone
        lifeline.sendall(json.dumps(asdict(ended)).encode())
    os._exit(0)


def _run(
    spec: ProcessSpec,
    function: Function | None,
    code: Sequence[str],
    outputs: Sequence[int],
    reply: int,
    lifeline: socket.socket,
) -> Exit:
    """Until all is dead, in a control group where the policy's layers have one. Raises OSError."""
    with contextlib.ExitStack() as stack:
        group = None
        if spec.policy is not None and spec.policy.layers.cgroup:
            group = stack.enter_context(cgroups.limited(spec.limits))
            spec = replace(spec, limits=cgroups.others(spec.limits))

        watches = spec.policy is not None and spec.policy.layers.notify
        watcher = Watcher(suspects_of(spec)) if watches else None

        def start(pipe: int) -> NoReturn:
            try:
                if group is not None:
                    group.enter()
            except OSError as error:  # the supervisor's to tell
                report(pipe, error=f"control group: {error}")
                os._exit(1)
            channel = watcher.channel if watcher else None
            run_child(spec, function, code, outputs, reply, pipe, lifeline.fileno(), channel)

        def fork() -> int:
            if spec.policy is None or not spec.policy.layers.namespaces:
                return os.fork()
            return fork_apart(network=spec.policy.own_network)

        ended = supervise(start, lifeline, outputs, spec.limits, fork=fork, watcher=watcher)
        if group is not None and ended.code and group.out_of_memory():
            ended = replace(ended, limit="memory")  # a shell, say, whose command was killed
        return ended
