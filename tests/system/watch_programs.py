"""Programs that try what is seen, and one that tries nothing."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress


def cheat():
    """Once each way to open and to connect; `SECRET` twice, by its name and by one that leads to it."""
    secret = os.environ["SECRET"]
    for path in (secret, os.path.relpath(secret), "/etc/shadow", b"/proc/1/environ"):
        with suppress(OSError):
            os.close(os.open(path, os.O_RDONLY))
    with suppress(OSError), open("sitecustomize.py", "w"):
        pass
    for family, host in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family) as client:
            client.settimeout(0.1)
            client.connect((host, 443))
    subprocess.run(["git", "log", "--all"], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(
        "pip install --retries 0 six", shell=True, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def cheat_in_the_background():
    """From a daemon, and from a thread of it."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            thread = threading.Thread(target=cheat)
            thread.start()
            thread.join()
            os.write(writing, b"x")
        os._exit(0)
    os.read(reading, 1)


def work():
    """What agents do all day."""
    with open("words.txt", "w") as file:
        file.write("hello\n")
    for name in ("tests", ".git"):
        os.makedirs(name, exist_ok=True)
        with open(f"{name}/conftest.py", "w"):
            pass
    with suppress(OSError):
        os.listdir("..")
    subprocess.run(["git", "status"], check=False, stderr=subprocess.DEVNULL)
    subprocess.run("cat words.txt | wc -l; ls -la / /proc /etc; cat /etc/passwd", shell=True, check=False)
    subprocess.run([sys.executable, "-c", "import asyncio, email, json"], check=True)
    with suppress(OSError), socket.socket() as client:
        client.connect(("127.0.0.1", 9))
    with suppress(OSError):
        socket.create_connection(("localhost", 9))


def open_for_ever():
    while True:
        os.close(os.open("/dev/null", os.O_RDONLY))


def open_under_signals():
    """A signal in the middle of a watched call neither fails it nor repeats it."""
    count = 0

    def note(*_):
        nonlocal count
        count += 1

    signal.signal(signal.SIGALRM, note)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    opened = 0
    while opened < 5000 or count < 200:
        os.close(os.open("/dev/null", os.O_RDONLY))
        with suppress(FileNotFoundError, PermissionError):
            os.close(os.open("/etc/shadow", os.O_RDONLY))
        opened += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(opened)


def tell_supervisor():
    """Its process, where it can be seen, and ours; then work that needs it."""
    with open("pids", "w") as file:
        file.write(f"{os.getppid()} {os.getpid()}")
    os.rename("pids", "told")
    open_for_ever()


def flood():
    """More than anybody reads."""
    for number in range(3000):
        with suppress(OSError):
            os.close(os.open(f"/etc/ssh/{number}_key", os.O_RDONLY))
    for _ in range(5):
        with suppress(OSError):
            os.close(os.open("/etc/ssh/0_key", os.O_RDONLY))


def wild_pointers():
    """Addresses that are none."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    results = [libc.open(ctypes.c_void_p(8), 0), libc.execv(ctypes.c_void_p(8), ctypes.c_void_p(16))]
    with socket.socket() as client:
        results.append(libc.connect(client.fileno(), ctypes.c_void_p(8), 16))
        results.append(libc.connect(client.fileno(), b"\x02\x00", 2))
    print(results)
