"""Programs that go to the limits of their control group."""

import mmap
import os
import signal
import time
from pathlib import Path

MB = 1 << 20


def show_groups():
    print(Path("/proc/self/cgroup").read_text())


def reserve():
    mmap.mmap(-1, 600 * MB)


def take():
    return bytearray(b"x") * (200 * MB)


def take_together():
    """Each of four has room, all four have not: what the kernel kills makes this one fail."""
    if not _lives_of(4, 50 * MB):
        raise MemoryError("a child was killed")


def lose_a_child():
    if _lives_of(1, 200 * MB):
        raise AssertionError("the child lives")


def _lives_of(num_children, num_bytes):
    """Whether all of them, with so much memory in use at once, could go on."""
    children = []
    for _ in range(num_children):
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            kept = bytearray(b"x") * num_bytes
            os.write(writable, b"1")
            signal.pause()
            os._exit(len(kept))
        os.close(writable)
        os.read(readable, 1)  # or its end
        children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGTERM)
    return all(os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM for pid in children)


def fork_on():
    """How many processes it can start, and what the next one says."""
    for number in range(1000):
        try:
            pid = os.fork()
        except OSError as error:
            print(number, error.errno)
            return
        if pid == 0:
            signal.pause()


def burn():
    burnt_s = time.process_time() + 0.1
    while time.process_time() < burnt_s:
        pass
