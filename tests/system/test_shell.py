"""`manege run --shell`: a person at a terminal, in an agent's sandbox."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios

import pytest

from tests.system.test_training import RUN_FILE, finish, manege

ASK = """python -c '
import json, os, urllib.request as u
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "q a"}], "max_tokens": 3}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
answer = json.load(u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)))
print("answered with", answer["usage"]["completion_tokens"], "tokens")'"""


class Person:
    """At a terminal of 40 rows and 100 columns."""

    def __init__(self, *words):
        self._ours, theirs = pty.openpty()
        self.resize(40, 100)
        self.before = termios.tcgetattr(theirs)
        self.process = manege("run", RUN_FILE, *words, stdin=theirs, stdout=theirs, stderr=theirs)
        self._theirs = theirs
        self.shown = ""

    def resize(self, rows, columns):
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def type(self, text):
        os.write(self._ours, text.encode())

    def sees(self, text):
        """Wait for it, and for nothing before it; what was shown up to there."""
        while text not in self.shown:
            while not select.select([self._ours], [], [], 0.1)[0]:
                assert self.process.poll() is None, self.shown
            self.shown += os.read(self._ours, 4096).decode(errors="replace")
        shown, _, self.shown = self.shown.partition(text)
        return shown

    def run(self, command):
        """What a command shows."""
        self.type(f"{command}; echo en''d\n")
        return self.sees("end\r\n").partition("echo en''d")[2]

    def leave(self):
        """Wait for the end of it all; its exit code, and what was shown up to there."""
        while self.process.poll() is None or select.select([self._ours], [], [], 0)[0]:
            if select.select([self._ours], [], [], 0.1)[0]:
                self.shown += os.read(self._ours, 4096).decode(errors="replace")
        return self.process.returncode, self.shown

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def settings(self):
        return termios.tcgetattr(self._theirs)


@pytest.fixture
def sits(tmp_path):
    """People who leave their terminals at the end."""
    people = []

    def sit(*words):
        people.append(Person(*words, f"folder={tmp_path / 'run'}"))
        return people[-1]

    yield sit
    for person in people:
        person.close()


def test_a_shell_has_the_sandbox_the_workspace_and_the_model_of_an_agent(sits, tmp_path):
    (tmp_path / "secret").write_text("nobody sees me")
    person = sits("--shell", "--task", "0")
    person.sees("sandbox$ ")
    prompted = person.settings()
    workspace = person.run("pwd; ls")
    assert f"{tmp_path}/run/workspaces/" in workspace
    assert "completion_tokens" not in workspace
    assert "answered with" in person.run(ASK.replace("\n", "\n"))
    hidden = person.run(f"cat {tmp_path / 'secret'}; tail -c 99 {RUN_FILE.absolute()}; echo $FIRST $TERM")
    assert "nobody sees me" not in hidden
    assert "cat: " in hidden
    assert "tail: " in hidden
    assert "40 100" in person.run("stty size")
    person.type("exit 7\n")
    code, shown = person.leave()
    assert code == 0, shown
    assert "outcome ok" in shown
    assert person.settings() == person.before != prompted


def test_keys_and_the_size_of_the_window_are_the_shells(sits):
    person = sits("--shell")
    person.sees("sandbox$ ")
    person.type("sh -c 'echo beg\"\"in; exec sleep 600'\n")
    person.sees("begin\r\n")
    person.type("\x03")
    person.sees("sandbox$ ")
    assert "130" in person.run("echo $?")
    person.resize(10, 33)
    person.process.send_signal(signal.SIGWINCH)
    while "10 33" not in person.run("stty size"):
        pass
    person.sees("sandbox$ ")  # before, it would not be the end of the input
    person.type("\x04")
    assert person.leave()[0] == 0


def test_without_a_terminal_it_says_so():
    code, _, errors = finish(manege("run", RUN_FILE, "--shell"))
    assert code == 2
    assert "--shell needs a terminal" in errors
