"""Programs that look around inside namespaces, and print what they found as JSON."""

import asyncio
import ctypes
import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW = {"mnt": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "net": 0x40000000}


def _results(tries):
    """What each said, `done`, or why not."""
    results = {}
    for name, attempt in tries.items():
        try:
            results[name] = attempt() or "done"
        except (OSError, subprocess.CalledProcessError) as error:
            code = getattr(error, "errno", None)
            results[name] = f"no: {errno.errorcode.get(code) or type(error).__name__}"
    print(json.dumps(results))


def _call(function, *arguments):
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ask(family, address):
    with socket.socket(family) as client:
        client.settimeout(5)
        client.connect(address)
        client.sendall(b"ping\n")
        return client.makefile().readline().strip()


def reach():
    """`TARGETS`: name to family and address; then every other way out."""
    targets = json.loads(os.environ["TARGETS"])
    tries = {
        name: lambda family=family, address=address: _ask(family, tuple(address) if family != 1 else address)
        for name, (family, address) in targets.items()
    }
    kinds = {
        "udp": (socket.AF_INET, socket.SOCK_DGRAM, 0),
        "udp6": (socket.AF_INET6, socket.SOCK_DGRAM, 0),
        "icmp": (socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP),
        "raw": (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        "mptcp": (socket.AF_INET, socket.SOCK_STREAM, 262),
        "netlink": (16, socket.SOCK_RAW, 0),
        "packet": (17, socket.SOCK_RAW, 0),
        "vsock": (40, socket.SOCK_STREAM, 0),
        "bluetooth": (31, socket.SOCK_RAW, 0),
        "kernel crypto": (38, socket.SOCK_SEQPACKET, 0),
    }
    tries |= {name: lambda kind=kind: socket.socket(*kind).close() for name, kind in kinds.items()}
    tries["dns"] = lambda: socket.getaddrinfo("example.com", 80) and "found"
    _results(tries)


def work():
    """What must go on working."""
    _results(
        {
            "unix": _unix,
            "abstract unix": lambda: _served(socket.AF_UNIX, "\0own"),
            "tcp": lambda: _served(socket.AF_INET, ("127.0.0.1", 0)),
            "tcp6": lambda: _served(socket.AF_INET6, ("::1", 0)),
            "localhost": lambda: socket.gethostbyname("localhost"),
            "multiprocessing": _multiprocessing,
            "asyncio": lambda: asyncio.run(_asyncio()),
            "temporary file": lambda: os.path.dirname(tempfile.mkdtemp()),
            "/tmp": lambda: Path("/tmp/file").write_text("x") and None,
            "TMPDIR is /tmp": lambda: str(Path(os.environ["TMPDIR"], "file").exists()),
            "user": lambda: subprocess.check_output(["id"], text=True).strip(),
            "processors": lambda: str(os.cpu_count() is not None),
            "memory": lambda: Path("/proc/meminfo").read_text()[:8],
            "shell": lambda: subprocess.check_output("cat <(echo hi) > /dev/null; echo $((6 * 7))", **_BASH),
            "/dev/stderr": lambda: subprocess.check_output("echo told > /dev/stderr", **_BASH) and None,
        }
    )


_BASH = {"shell": True, "executable": "/bin/bash", "text": True}


def _unix():
    return _served(socket.AF_UNIX, "own.sock")


def _served(family, address):
    with socket.create_server(address, family=family) if family != socket.AF_UNIX else _unix_server(address) as server:
        server.listen()
        thread = threading.Thread(target=_answer, args=(server,))
        thread.start()
        answer = _ask(family, server.getsockname())
        thread.join()
        return answer


def _unix_server(address):
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    return server


def _answer(server):
    connection, _ = server.accept()
    with connection:
        connection.recv(100)
        connection.sendall(b"pong\n")


def _multiprocessing():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_put, args=(queue,))
    process.start()
    got = queue.get()
    process.join()
    return got


def _put(queue):
    queue.put("queued")


async def _asyncio():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    out, _ = await process.communicate(b"through cat")
    return out.decode()


def look_at_others():
    """At processes, above all the first."""

    def first(name):
        return lambda: str(len(Path("/proc/1", name).read_bytes()))

    def survives():
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            try:
                os.kill(1, number)
            except PermissionError:
                continue
        os.kill(int(os.environ["OUTSIDE"]), 0)

    def pids():
        listed = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        return " ".join(map(str, listed))

    _results(
        {
            "pids": pids,
            "environ": first("environ"),
            "mem": first("mem"),
            "maps": first("maps"),
            "fd": lambda: str(os.listdir("/proc/1/fd")),
            "root": lambda: str(os.listdir("/proc/1/root")),
            "cwd": lambda: str(os.listdir("/proc/1/cwd")),
            "attach": lambda: _call(_LIBC.ptrace, 16, 1, 0, 0),
            "vm": lambda: _call(_LIBC.process_vm_readv, 1, None, 0, None, 0, 0),
            "signal it and one outside": survives,
        }
    )


def look_at_the_system():
    def write(path):
        return lambda: Path(path).write_text("x") and None

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return lambda: next(line.split(maxsplit=1)[1] for line in lines if line.startswith(name))

    def namespaces():
        return " ".join(os.readlink(f"/proc/self/ns/{name}") for name in sorted({*_NEW, "pid"} - {"cgroup"}))

    tries = {f"unshare {name}": lambda flag=flag: _call(_LIBC.unshare, flag) for name, flag in _NEW.items()}
    tries |= {
        f"write {path}": write(path)
        for path in (
            "/file",
            "/usr/file",
            "/etc/passwd",
            "/dev/file",
            "/proc/sys/kernel/core_pattern",
            "/proc/sysrq-trigger",
            "/proc/self/uid_map",
            "/sys/devices/system/cpu/cpu1/online",
        )
    }
    tries |= {
        "remount": lambda: _call(_LIBC.mount, b"none", b"/", None, 32, None),
        "unmount": lambda: _call(_LIBC.umount2, b"/proc", 2),
        "make a device": lambda: os.mknod("disk", 0o600 | 0o060000, os.makedev(254, 0)),
        "chroot": lambda: os.chroot("."),
        "become root": lambda: os.setuid(0),
        "set-uid program": lambda: subprocess.check_output(["su", "-c", "id"], stdin=-3, stderr=-3, text=True),
        "host name": lambda: socket.sethostname("x"),
        "resolv.conf": lambda: Path("/etc/resolv.conf").read_text(),
        "password hashes": lambda: Path("/etc/shadow").read_text(),
        "list root": lambda: " ".join(sorted(os.listdir("/"))),
        "list home": lambda: " ".join(sorted(os.listdir(os.environ["REAL_HOME"]))),
        "list devices": lambda: " ".join(sorted(os.listdir("/dev"))),
        "name": socket.gethostname,
        "hosts": lambda: Path("/etc/hosts").read_text(),
        "capabilities": lambda: " ".join(status(name)() for name in ("CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb")),
        "no new privileges": status("NoNewPrivs"),
        "groups": lambda: str(os.getgroups()),
        "namespaces": namespaces,
    }
    _results(tries)


_WAIT = "import time; print('up', flush=True); time.sleep(600)"
_LEAVERS = {
    "double fork": f"""
import os
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
{_WAIT}
""",
    "nohup": f"""
import subprocess, sys
subprocess.Popen(["nohup", sys.executable, "-c", {_WAIT!r}, sys.argv[1]])
""",
    "setsid": f"""
import subprocess, sys
subprocess.Popen(["setsid", sys.executable, "-c", {_WAIT!r}, sys.argv[1]])
""",
    "deaf": f"""
import signal
for number in {{*range(1, 32)}} - {{signal.SIGKILL, signal.SIGSTOP}}:
    signal.signal(number, signal.SIG_IGN)
{_WAIT}
""",
    "server": f"""
import socket
server = socket.create_server(("127.0.0.1", 0))
{_WAIT}
""",
    "stopped": """
import os, signal
print("up", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
""",
    "respawner": """
import os, time
print("up", flush=True)
while True:
    if os.fork(): os._exit(0)
    time.sleep(0.001)
""",
    "threads": f"""
import threading, time
for _ in range(9): threading.Thread(target=time.sleep, args=(600,)).start()
{_WAIT}
""",
}


def leave():
    """One process of the kind `KIND` that does not end, with `TOKEN` among its arguments."""
    code = _LEAVERS[os.environ["KIND"]]
    leaver = subprocess.Popen([sys.executable, "-c", code, os.environ["TOKEN"]], stdout=subprocess.PIPE, text=True)
    print(leaver.stdout.readline().strip(), flush=True)


def leave_and_wait():
    leave()
    time.sleep(600)
