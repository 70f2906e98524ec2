"""The last steps before a program runs: descriptors, environment, limits, sandbox, then exec or call.

Runs in the supervisor's child. Until the program starts, every failure is written to `pipe` and the process ends; the
pipe closes with the start. A function is then run as the interpreter would run a script: its exceptions, SystemExit
and atexit functions mean the same.
"""

import asyncio
import atexit
import fcntl
import inspect
import itertools
import json
import numbers
import os
import pwd
import random
import resource
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence, Set
from typing import Any, NoReturn

from manege.sandbox.bubblewrap import Boxed
from manege.sandbox.bubblewrap import enter as enter_bubblewrap
from manege.sandbox.code import command_paths
from manege.sandbox.init import enter
from manege.sandbox.mounts import leave_mounts
from manege.sandbox.overlay import mount_overlay
from manege.sandbox.policy import apply
from manege.sandbox.spec import REPLY, Limits, ProcessSpec
from manege.sandbox.supervisor import report
from manege.sandbox.syscalls import PR_SET_PDEATHSIG, is_linux, prctl
from manege.sandbox.watch import hand_over

__all__ = ["Function", "become", "is_apart", "run_child"]

Function = Callable[..., Any]

_COULD_NOT_START = 127


def run_child(
    spec: ProcessSpec,
    function: Function | None,
    code: Sequence[str],
    outputs: Sequence[int],
    reply: int,
    pipe: int,
    lifeline: int,
    channel: int | None,
) -> NoReturn:
    """Become the program, or with namespaces their first process and its parent. `code`: files of interpreter and
    function; `outputs`: stdout and stderr; `reply`: a file; `channel`: of a Watcher, if there is one."""
    try:
        policy = spec.policy
        _detach(pipe)
        keep = {pipe, *([reply] if function or spec.replies else []), *([lifeline] if is_apart(spec) else [])}
        _connect(spec, outputs, keep if channel is None else {*keep, channel})
        listable: Sequence[str] = ()
        if policy is not None and function is None:
            # Of whoever started manege: the environment names the agent's own.
            home = pwd.getpwuid(os.getuid()).pw_dir
            readable, listable = command_paths(spec.program, spec.env.get("PATH", os.defpath), home=home)
            code = [*code, *readable]
        if policy is not None and policy.layers.bubblewrap:
            told = Boxed(
                spec=spec,
                code=code,
                listable=listable,
                lifeline=lifeline,
                pipe=pipe,
                reply=reply if reply in keep else None,
                channel=channel,
            )
            enter_bubblewrap(told)
        elif is_apart(spec):
            enter(spec, code=code, lifeline=lifeline, pipe=pipe)
        elif spec.overlay is not None:
            leave_mounts()
            mount_overlay(spec.overlay)
    except BaseException as error:  # a process that is half set up may not go on, whatever it was
        report(pipe, error=f"{type(error).__name__}: {error}")
        os._exit(_COULD_NOT_START)
    become(spec, function, code, listable, reply, pipe, channel)


def become(
    spec: ProcessSpec,
    function: Function | None,
    code: Sequence[str],
    listable: Sequence[str],
    reply: int,
    pipe: int,
    channel: int | None,
) -> NoReturn:
    """The program, in a process that has all but its environment, limits and filters. `listable`: see `apply`."""
    try:
        _settle(spec)
        if spec.policy is not None:
            apply(spec.policy, code=code, listable=listable)
        if channel is not None:
            hand_over(channel)
        if function is None:
            if spec.replies:
                pipe = _offer_reply(reply, pipe)
            os.execvpe(spec.program[0], list(spec.program), dict(spec.env))
    except BaseException as error:  # a process that is half set up may not go on, whatever it was
        report(pipe, error=f"{type(error).__name__}: {error}")
        os._exit(_COULD_NOT_START)
    if not spec.replies:
        os.close(reply)
    os.close(pipe)
    _exit_after(spec, function, reply)


def is_apart(spec: ProcessSpec) -> bool:
    """Whether it gets namespaces."""
    return spec.policy is not None and spec.policy.layers.apart


def _detach(pipe: int) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    # Python ignores the last two; with the default, a file that grows too big ends the program in the kernel's way.
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if is_linux():
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        poll = select.poll()
        poll.register(pipe, 0)
        if poll.poll(0):  # nobody reads: the supervisor has died before
            os._exit(_COULD_NOT_START)
        _offer_to_oom_killer()


def _connect(spec: ProcessSpec, outputs: Sequence[int], keep: Set[int]) -> None:
    """Standard streams, and no descriptors beside `keep`."""
    uid = spec.policy.uid if spec.policy else None
    if uid is not None:
        for output in outputs:
            os.fchown(output, uid, uid)  # or /dev/stdout could not be opened
    with tempfile.TemporaryFile() if spec.stdin else open(os.devnull, "r+b") as stdin:
        if spec.stdin:
            stdin.write(spec.stdin)
            stdin.seek(0)
        for target, source in enumerate((stdin.fileno(), *outputs)):
            os.dup2(source, target)
    edges = [2, *sorted(keep), os.sysconf("SC_OPEN_MAX")]
    for low, high in itertools.pairwise(edges):
        os.closerange(low + 1, high)


def _offer_reply(reply: int, pipe: int) -> int:
    """Give the command its descriptor to answer on, and the pipe, which may be in the way, another number."""
    apart = fcntl.fcntl(reply, fcntl.F_DUPFD_CLOEXEC, REPLY + 1)
    pipe = fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, REPLY + 1)
    os.dup2(apart, REPLY)
    return pipe


def _settle(spec: ProcessSpec) -> None:
    os.umask(0o022)
    os.chdir(spec.cwd)
    os.environ.clear()
    os.environ.update(spec.env)
    _set_limits(spec.limits)


def _set_limits(limits: Limits) -> None:
    """Limits of each process; descendants inherit them. Not their number: RLIMIT_NPROC counts all processes of a user,
    and root is exempt, so the supervisor counts them."""
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: limits.memory_bytes if is_linux() else None,  # macOS refuses it
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.num_files,
    }
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        if value is not None:
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


def _offer_to_oom_killer() -> None:
    """A machine that runs out of memory should lose an agent, not the training."""
    with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("500")


def _exit_after(spec: ProcessSpec, function: Function, reply: int) -> NoReturn:
    """Call the function and exit as a script would; os._exit spares taking the modules down one by one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.argv = [str(spec.program)]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    code = 0
    try:
        result = function(*spec.args)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        if spec.replies:
            os.write(reply, json.dumps(result, default=_plain).encode())
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # without this frame of ours
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
        if isinstance(error, MemoryError):
            _flush()
            os.kill(os.getpid(), signal.SIGKILL)  # says so to the supervisor, as the kernel would
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)  # noqa: T201  # what the interpreter does with `sys.exit("message")`
    return 1


def _plain(value: Any) -> float | str:
    """Numbers of other libraries as floats; the rest as text, which no reader takes for a number."""
    return float(value) if isinstance(value, numbers.Real) else repr(value)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed by the program, or a full disk
            pass
