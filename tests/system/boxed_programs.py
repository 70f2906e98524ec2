"""An agent that looks around in its sandbox and tries to get out of it."""

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path


def look_around():
    """What it finds, as JSON."""
    return {
        "uid": os.getuid(),
        "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
        "root": sorted(os.listdir("/")),
        "environment": sorted(os.environ),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{name}").split(":")[0] for name in _open_descriptors()),
        "host": socket.gethostname(),
        "powers": [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Cap")],
    }


def try_out():
    """Each attempt's outcome; the paths come from the environment."""
    Path("mine").write_text("written")
    attempts = {
        "read a private file": lambda: Path(os.environ["PRIVATE"]).read_text(),
        "list a private folder": lambda: os.listdir(os.path.dirname(os.environ["PRIVATE"])),
        "read what is not listed": lambda: Path(os.environ["UNLISTED"]).read_text(),
        "write to what may be read": lambda: Path(os.environ["READABLE"]).write_text("changed"),
        "write to the root": lambda: Path("/new").touch(),
        "write to the system": lambda: Path("/usr/new").touch(),
        "look into the first process": lambda: Path("/proc/1/environ").read_bytes(),
        "kill the first process": lambda: os.kill(1, signal.SIGKILL),
        "reach another port of the host": lambda: _connect(("127.0.0.1", int(os.environ["OTHER_PORT"]))),
        "use netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "make a namespace": lambda: _unshare(0x10000000),
        "read what may be read": lambda: Path(os.environ["READABLE"]).read_text(),
        "talk to itself": _talk_to_itself,
        "ask the gateway": lambda: urllib.request.urlopen(os.environ["GATEWAY"], timeout=30).read().decode(),
    }
    outcomes = {}
    for name, attempt in attempts.items():
        try:
            outcomes[name] = attempt() or "done"
        except OSError as error:
            reason = getattr(error, "reason", error)
            outcomes[name] = errno.errorcode[reason.errno]
    return outcomes


def leave_daemons():
    """Three that no polite signal and no new session ends."""
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.execvp("sleep", ["sleep", os.environ["SECONDS"]])
            os._exit(0)
        os.wait()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def _open_descriptors():
    return [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]


def _connect(address):
    socket.create_connection(address, timeout=30).close()


def _unshare(flags):
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def _talk_to_itself():
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("own.sock")
        server.listen()
        client.connect("own.sock")
    return subprocess.run(["echo", "said"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    print(json.dumps({"look_around": look_around, "try_out": try_out}[sys.argv[1]]()))
