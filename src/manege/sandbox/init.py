"""The first process of a sandboxed program's namespaces: it sets them up, forks the program, and is their end.

In: a policy, the files that the program consists of, and the lifeline. Out: on the lifeline the socket that listens
inside; to the supervisor how the program ended. When it exits, the kernel kills every process that is left, before the
supervisor sees it die. It cannot be looked into from inside, and signals from there do not reach it.
"""

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from manege.sandbox import root
from manege.sandbox.mounts import keep_mounts_private, protect
from manege.sandbox.namespaces import INSIDE_ID, bring_up_loopback, listen, map_ids, unshare_users
from manege.sandbox.overlay import mount_overlay
from manege.sandbox.policy import Policy, system_paths
from manege.sandbox.spec import LISTENER, ProcessSpec
from manege.sandbox.supervisor import report
from manege.sandbox.syscalls import PR_SET_DUMPABLE, prctl

__all__ = ["HOST_NAME", "await_end", "enter", "hand_out", "layout"]

HOST_NAME = "sandbox"


def enter(spec: ProcessSpec, *, code: Iterable[str], lifeline: int, pipe: int) -> None:
    """Set up the namespaces that this process is the first of; return in the program's process. Raises OSError."""
    policy = spec.policy
    assert policy is not None
    with contextlib.suppress(PermissionError):  # an ordinary user keeps them; files of theirs are nowhere to be seen
        os.setgroups([])
    if policy.own_network:
        bring_up_loopback()
        if policy.listen_port is not None:
            hand_out(policy.listen_port, lifeline)
    os.close(lifeline)
    keep_mounts_private()
    if spec.overlay is not None:
        mount_overlay(spec.overlay, uid=policy.uid)
    places, links, files = layout(policy, code, spec.env)
    root.build(places, links=links, files=files, terminals=policy.terminals)
    socket.sethostname(HOST_NAME)
    ours, theirs = socket.socketpair()
    program = os.fork()
    if program == 0:
        ours.close()
        os.setsid()
        with theirs:
            unshare_users(theirs)
        return
    theirs.close()
    prctl(PR_SET_DUMPABLE, 0)
    with ours:
        if ours.recv(1):
            outside = policy.uid or 0
            map_ids(program, inside=INSIDE_ID, uid=outside, gid=outside)
            protect("/proc")
            ours.sendall(b"m")
    await_end(program, pipe)


def hand_out(port: int, lifeline: int) -> None:
    """Listen, and let the launcher have the socket."""
    with listen(port) as listener, socket.socket(fileno=os.dup(lifeline)) as channel:
        socket.send_fds(channel, [LISTENER], [listener.fileno()])


def layout(
    policy: Policy, code: Iterable[str], env: Mapping[str, str]
) -> tuple[Sequence[root.Place], Mapping[str, str], Mapping[str, str]]:
    """The root: its mounts, links with their targets, and files with their content."""
    links: dict[str, str] = {}
    readable: list[str] = []
    for path in (*system_paths(policy), *code, *policy.readable):
        real, found = root.resolve(path)
        links |= found
        if os.path.exists(real):
            readable.append(real)
    writable = {os.path.realpath(path): os.path.realpath(path) for path in policy.writable}
    writable |= {place: os.path.realpath(folder) for place, folder in policy.folders.items()}
    scratch = os.path.realpath(env.get("TMPDIR", "/"))
    if scratch in writable:
        writable["/tmp"] = scratch
    hidden = [os.path.realpath(path) for path in policy.private]
    places = root.plan(readable=readable, writable=writable, hidden=hidden)
    files = {} if policy.host_network else {"/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n"}
    home = env.get("HOME", "/")
    files["/etc/passwd"] = (
        f"root:x:0:0:root:/nonexistent:/usr/sbin/nologin\nagent:x:{INSIDE_ID}:{INSIDE_ID}:agent:{home}:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    )
    files["/etc/group"] = f"root:x:0:\nagent:x:{INSIDE_ID}:\nnogroup:x:65534:\n"
    return places, links, files


def await_end(program: int, pipe: int) -> NoReturn:
    """Bury what dies until the program has ended; say how, and how many are left."""
    while True:
        pid, status = os.wait()
        if pid == program:
            break
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    num_left = sum(name.isdigit() for name in os.listdir("/proc")) - 1
    report(pipe, status=status, num_left=num_left)
    os._exit(0)
