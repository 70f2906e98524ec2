"""Agents, setups and scorers for the tests of sandbox and controller. Run as a script it tries what is forbidden."""

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path


def nothing():
    pass


def greet():
    print("hello", os.environ["NAME"])
    print("to stderr", file=sys.stderr)
    Path("greeting.txt").write_text("hello")


async def greet_async():
    greet()


def leave_by_message():
    sys.exit("no, thanks")


def leave_by_code():
    sys.exit(7)


def raise_error():
    raise RuntimeError("broken on purpose")


def in_thread():
    threading.Thread(target=lambda: (time.sleep(0.05), print("thread done"))).start()


def add(a, b):
    return a + b


def sleep():
    time.sleep(60)


def exhaust_memory():
    return bytearray(1 << 40)


def fill_a_file():
    with open("big", "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
            file.flush()


def print_a_lot():
    for _ in range(64):
        print("x" * (1 << 16))


def fork_many():
    for _ in range(40):
        subprocess.Popen(["sleep", "60"])
    time.sleep(60)


def draw():
    import random

    return random.random()


def leave_daemons():
    """Three kinds of processes that try to outlive their parent; each beats into a file of its own."""
    beat = "while true; do echo x >> {0}; sleep 0.02; done"
    subprocess.Popen(["setsid", "sh", "-c", beat.format("setsid")])
    subprocess.Popen(["nohup", "sh", "-c", beat.format("nohup")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            while True:
                with open("double", "a") as file:
                    file.write("x")
                time.sleep(0.02)
        os._exit(0)
    while not all(Path(name).exists() for name in ("setsid", "nohup", "double")):
        time.sleep(0.01)


def leave_daemons_and_wait():
    leave_daemons()
    time.sleep(60)


def ask_once():
    """One model call with the standard library."""
    body = json.dumps({"model": "default", "messages": [{"role": "user", "content": os.environ["QUESTION"]}]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        print(json.load(response)["choices"][0]["message"]["content"])


def ask_twice():
    ask_once()
    ask_once()


def ask_and_ignore():
    with contextlib.suppress(urllib.error.HTTPError):
        ask_once()


def ask_until_killed():
    while True:
        ask_and_ignore()
        time.sleep(0.1)


def ask_twice_and_fail():
    ask_and_ignore()
    ask_and_fail()


def ask_and_fail():
    ask_once()
    sys.exit(3)


def ask_and_hang():
    ask_once()
    Path("half").write_text("done")
    sys.stdout.flush()
    time.sleep(60)


def poison():
    Path("poison").touch()


def post_reward():
    body = json.dumps({"event_type": "reward", "data": {"value": 0.25}}).encode()
    headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(os.environ["MANEGE_EVENT_URL"], body, headers)).close()


def prepare(task, workspace):
    (workspace / "given.txt").write_text(task.hidden["given"])


def prepare_badly(task, workspace):
    raise RuntimeError(f"no such image for {task.id}")


def score_one(task, attempt):
    return 1.0


def score_nothing(task, attempt):
    return None


def score_files(task, attempt):
    """Counts what an agent can leave, and proves that no process of it is left: nothing grows any more."""
    sizes = {path.name: path.stat().st_size for path in attempt.workspace.iterdir()}
    time.sleep(0.2)
    assert sizes == {path.name: path.stat().st_size for path in attempt.workspace.iterdir()}
    print(sizes)
    return float(len(sizes))


def score_record(task, attempt):
    """1 if the record is as `ask_once` must have left it."""
    (call,) = attempt.calls
    assert call.request["messages"][-1]["content"] == task.input["question"], call.request
    assert call.reply["content"] == attempt.stdout.strip(), (call.reply, attempt.stdout)
    assert (attempt.exit_code, attempt.timed_out) == (0, False)
    assert task.hidden == {"given": "secret"}
    assert not any(name.startswith(("OPENAI", "AGL")) for name in os.environ), sorted(os.environ)
    return 1.0


def score_unless_poisoned(task, attempt):
    if (attempt.workspace / "poison").exists():
        time.sleep(60)
    return 1.0


def score_calls(task, attempt):
    """What the task says of each call, in their order."""
    rewards = zip(attempt.calls, task.input["earned"], strict=True)
    return {"reward": 0.5, "calls": {call.id: value for call, value in rewards}}


def score_first_of_group(task, attempt):
    """No verdict on the others."""
    return 1.0 if re.search(r"[0-9a-f]{8}-[0-9]{6}-0\b", str(attempt.workspace)) else None


def score_strangers(task, attempt):
    return {"reward": 1.0, "calls": {"nobody": 1.0}}


def score_crash(task, attempt):
    raise RuntimeError("the scorer is broken")


def score_nonsense(task, attempt):
    values = {
        "text": "0.5",
        "nan": float("nan"),
        "infinity": float("inf"),
        "bool": True,
        "object": object(),
        "list": [1],
    }
    return values[task.input["nonsense"]]


def try_forbidden():
    """Tries each thing and prints what came of it, as JSON."""
    environ, results = os.environ, {}
    outside, secret = Path(environ["OUTSIDE"]), Path(environ["SECRET"])
    controller, supervisor = int(environ["CONTROLLER"]), os.getppid()
    gateway, other = int(environ["GATEWAY_PORT"]), int(environ["OTHER_PORT"])
    libc = ctypes.CDLL(None, use_errno=True)

    def connect(port, protocol=0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol) as opened:
            opened.settimeout(5)
            opened.connect(("127.0.0.1", port))

    def fast_open():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as opened:
            opened.sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", other))

    def bind():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as opened:
            opened.bind(("127.0.0.1", 0))

    def raise_limit():
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard + 1))

    def call(function, *arguments):
        if function(*arguments) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def run(*command):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(1, done.stderr)

    tries = {
        "write outside": lambda: outside.write_text("x"),
        "truncate outside": lambda: os.truncate(secret, 0),
        "rename outside": lambda: secret.rename(outside),
        "delete outside": lambda: secret.unlink(),
        "read a secret": lambda: secret.read_text(),
        "read it through a link": lambda: (os.symlink(secret, "link"), Path("link").read_text()),
        "list home": lambda: os.listdir(Path.home()),
        "read password hashes": lambda: Path("/etc/shadow").read_text(),
        "write the shared scratch folder": lambda: Path("/dev/shm/manege-test").write_text("x"),
        "another port": lambda: connect(other),
        "another port by MPTCP": lambda: connect(other, 262),
        "another port by TCP Fast Open": fast_open,
        "bind": bind,
        "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
        "unix socket": lambda: socket.socket(socket.AF_UNIX),
        "netlink": lambda: socket.socket(16, socket.SOCK_RAW),
        "vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
        "ptrace the supervisor": lambda: call(libc.ptrace, 16, supervisor, 0, 0),
        "environment of the controller": lambda: Path(f"/proc/{controller}/environ").read_bytes(),
        "memory of the supervisor": lambda: Path(f"/proc/{supervisor}/mem").read_bytes(),
        "signal the controller": lambda: os.kill(controller, 0),
        "signal the supervisor": lambda: os.kill(supervisor, 0),
        "signal its group": lambda: os.killpg(supervisor, 0),
        "signal everybody": lambda: os.kill(-1, signal.SIGCONT),
        "limit the controller": lambda: resource.prlimit(controller, resource.RLIMIT_CPU),
        "unshare": lambda: call(libc.unshare, 0x10000000),
        "new user namespace": lambda: run("unshare", "-Ur", "true"),
        "mount": lambda: call(libc.mount, b"none", b".", b"tmpfs", 0, None),
        "raise a limit": raise_limit,
        "make a device": lambda: os.mknod("device", 0o600 | 0o020000, os.makedev(1, 3)),
        "become privileged": lambda: socket.sethostname("x"),
        # What must go on working.
        "ok: gateway": lambda: connect(gateway),
        "ok: workspace": lambda: (Path("mine").mkdir(), Path("mine/file").write_text("x")),
        "ok: rename": lambda: Path("mine/file").rename("file"),
        "ok: scratch": lambda: Path(environ["TMPDIR"], "file").write_text("x"),
        "ok: null": lambda: Path("/dev/null").write_text("x"),
        "ok: task": lambda: Path(environ["MANEGE_TASK_FILE"]).read_text(),
        "ok: socketpair": lambda: [end.close() for end in socket.socketpair()],
        "ok: thread": lambda: threading.Thread(target=nothing).start(),
        "ok: shell": lambda: run("bash", "-c", "echo $((1 + 1)) | cat > sum; test $(cat sum) = 2"),
        "ok: python": lambda: run(sys.executable, "-c", "import email.parser, pydantic"),
        "ok: own signals": lambda: run("bash", "-c", "sleep 60 & kill $!; wait"),
    }
    for name, attempt in tries.items():
        try:
            attempt()
        except (OSError, ValueError) as error:
            results[name] = f"{type(error).__name__}: {error}"
        else:
            results[name] = "done"
    results["open descriptors"] = sorted(number for number in range(64) if is_open(number))
    results["environment"] = sorted(environ)
    print(json.dumps(results))


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    try_forbidden()
