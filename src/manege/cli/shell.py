"""The user's terminal, lent to a shell in an agent's sandbox.

The shell gets a terminal of its own, a pair whose other end this process holds: it never has the user's. A thread
carries what is typed and shown between the two from the shell's first word to its end; meanwhile the user's terminal
passes on every key as it is, Ctrl-C too, and the size of its window.
"""

import fcntl
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from manege.errors import ConfigError

__all__ = ["lent_terminal"]

_CHUNK = 1 << 12


@contextmanager
def lent_terminal() -> Iterator[str]:
    """The path of the shell's terminal. Raises ConfigError where the user has none."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("--shell needs a terminal: its input and output may not be files or pipes")
    ours, theirs = os.openpty()
    ended, end = os.pipe()
    before = signal.signal(signal.SIGWINCH, lambda *_: _copy_size(ours))
    _copy_size(ours)
    os.set_blocking(ours, False)
    thread = threading.Thread(target=_carry, args=(ours, theirs, ended), name="terminal")
    thread.start()
    try:
        yield os.ttyname(theirs)
    finally:
        os.close(end)
        thread.join()
        signal.signal(signal.SIGWINCH, before)
        for descriptor in (ours, theirs, ended):
            os.close(descriptor)


def _copy_size(ours: int) -> None:
    size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(ours, termios.TIOCSWINSZ, size)


def _carry(ours: int, theirs: int, ended: int) -> None:
    """Until nobody has the shell's terminal open any more, or `ended` says so."""
    if ended in select.select([ours, ended], [], [])[0]:
        return
    keyboard, screen = sys.stdin.fileno(), sys.stdout.fileno()
    settings = termios.tcgetattr(keyboard)
    tty.setraw(keyboard, termios.TCSANOW)
    # From now on, only the shell's side keeps it open.
    os.dup2(ended, theirs)
    try:
        with suppress(OSError):  # Linux says so when the other side is closed
            _carry_both(ours, keyboard, screen, ended)
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, settings)


def _carry_both(ours: int, keyboard: int, screen: int, ended: int) -> None:
    typed = b""
    while True:
        # What the shell does not take yet stays at the keyboard.
        ready, free, _ = select.select([ours, ended, *([] if typed else [keyboard])], [ours] if typed else [], [])
        if ended in ready:
            return
        if ours in ready:
            shown = os.read(ours, _CHUNK)
            while shown:
                shown = shown[os.write(screen, shown) :]
        if keyboard in ready:
            typed = os.read(keyboard, _CHUNK)
        if free and typed:
            typed = typed[os.write(ours, typed) :]
