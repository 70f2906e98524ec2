"""The same sandbox where only bubblewrap may make namespaces: what is kept out, what works, and nothing is left."""

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from manege.errors import HarnessError
from manege.sandbox import bubblewrap
from manege.sandbox.launcher import search_path
from manege.sandbox.policy import Policy
from manege.sandbox.probe import probe
from manege.sandbox.spec import Limits, ProcessSpec
from tests.ordinary_user import run_as_nobody
from tests.system import boxed_programs

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not bubblewrap.available(), reason="needs Debian's bubblewrap, and that it may make namespaces"),
]

PROGRAMS = "tests.system.boxed_programs"
SCRIPT = str(Path(boxed_programs.__file__).absolute())
PORT = 18080


class Greeting(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"the gateway's answer")

    def log_message(self, *_):
        pass


@pytest.fixture
def box(tmp_path):
    """The request for a program, in a folder that also holds what it must not see."""
    for name in ("workspace", "home", "scratch", "shown/private", "unlisted"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("shown/file", "shown/private/key", "unlisted/file"):
        (tmp_path / name).write_text("text")
    with socket.create_server(("127.0.0.1", 0)) as other:
        policy = Policy(
            layers=replace(probe(), namespaces=False, overlay=False, uids=False, bubblewrap=True),
            writable=[str(tmp_path / name) for name in ("workspace", "home", "scratch")],
            readable=[str(tmp_path / "shown")],
            private=[str(tmp_path / "shown" / "private")],
            tcp_ports=[],
            protected_pids=[os.getpid()],
            listen_port=PORT,
        )
        env = {
            "PATH": search_path(),
            "HOME": str(tmp_path / "home"),
            "LANG": "C.UTF-8",
            "TMPDIR": str(tmp_path / "scratch"),
            "GATEWAY": f"http://127.0.0.1:{PORT}",
            "OTHER_PORT": str(other.getsockname()[1]),
            "PRIVATE": str(tmp_path / "shown" / "private" / "key"),
            "READABLE": str(tmp_path / "shown" / "file"),
            "UNLISTED": str(tmp_path / "unlisted" / "file"),
        }

        def request(program, **changes):
            return ProcessSpec(
                program=program,
                role="agent",
                env=env | changes,
                cwd=str(tmp_path / "workspace"),
                stdout=str(tmp_path / "stdout"),
                stderr=str(tmp_path / "stderr"),
                limits=Limits(memory_bytes=1 << 30, num_processes=64, num_files=256),
                policy=policy,
                replies=isinstance(program, str),
            )

        yield request


async def answer_of(launcher, request):
    """Of a function or a script, while its gateway answers."""
    servers = []

    def serve(listener):
        server = HTTPServer(("127.0.0.1", PORT), Greeting, bind_and_activate=False)
        server.socket.close()
        server.socket = listener
        servers.append(server)
        threading.Thread(target=server.serve_forever, name="gateway").start()

    try:
        ended = await launcher.run(request, 60, on_listener=serve)
    finally:
        for server in servers:
            await asyncio.to_thread(server.shutdown)
            server.server_close()
    assert ended.code == 0, Path(request.stderr).read_text()
    assert len(servers) == 1
    return json.loads(Path(request.stdout).read_text() if ended.reply is None else ended.reply)


def script(name):
    return [shutil.which("python3", path=search_path()), SCRIPT, name]


@pytest.mark.parametrize("program", [f"{PROGRAMS}:try_out", script("try_out")], ids=["function", "command"])
async def test_only_what_is_listed_can_be_reached(launcher, box, tmp_path, program):
    assert await answer_of(launcher, box(program)) == {
        "read a private file": "ENOENT",
        "list a private folder": "EACCES",
        "read what is not listed": "ENOENT",
        "write to what may be read": "EROFS",
        "write to the root": "EROFS",
        "write to the system": "EROFS",
        "look into the first process": "EACCES",
        "kill the first process": "EPERM",
        "reach another port of the host": "ECONNREFUSED",
        "use netlink": "EAFNOSUPPORT",
        "make a namespace": "EPERM",
        "read what may be read": "text",
        "talk to itself": "said",
        "ask the gateway": "the gateway's answer",
    }
    assert (tmp_path / "workspace" / "mine").read_text() == "written"
    assert not list((tmp_path / "shown").glob("new"))


@pytest.mark.parametrize("program", [f"{PROGRAMS}:look_around", script("look_around")], ids=["function", "command"])
async def test_it_is_alone_and_powerless(launcher, box, program):
    seen = await answer_of(launcher, box(program))
    assert seen["uid"] == 1000
    assert seen["processes"] == [1, 2]
    assert seen["host"] == "sandbox"
    assert {"home", "boot", "srv", "var", "run", "mnt"}.isdisjoint(seen["root"])
    assert set(seen["environment"]) == {*box(program).env}
    assert {line.split()[1] for line in seen["powers"]} == {"0" * 16}
    assert not {"pipe", "socket"} & {*seen["descriptors"]}


async def test_what_it_leaves_behind_is_dead(launcher, box):
    seconds = f"{1_000_000 + os.getpid()}.25"
    ended = await launcher.run(box(f"{PROGRAMS}:leave_daemons", SECONDS=seconds), 60)
    assert (ended.code, ended.num_left) == (0, 3)
    assert sleepers(seconds) == []


async def test_a_cancelled_one_is_dead_at_once(launcher, box):
    running, pid = await start_sleep(launcher, box)
    running.cancel()
    await asyncio.wait([running])
    assert not os.path.exists(f"/proc/{pid}")


async def test_with_its_supervisor_it_dies(launcher, box):
    running, pid = await start_sleep(launcher, box)
    end = os.pidfd_open(pid)
    os.kill(parent_of(parent_of(parent_of(pid))), signal.SIGKILL)  # beyond the first process inside, and bubblewrap
    with pytest.raises(HarnessError, match="its supervisor was killed"):
        await running
    assert await asyncio.to_thread(select.select, [end], [], [], 30) == ([end], [], [])
    os.close(end)


async def test_its_end_is_told_as_it_was(launcher, box):
    killed = await launcher.run(box(f"{PROGRAMS}:die"), 60)
    assert (killed.code, killed.signal) == (None, 9)
    failed = await launcher.run(box(["sh", "-c", "exit 7"]), 60)
    assert (failed.code, failed.signal) == (7, None)


async def start_sleep(launcher, box):
    """Its task and its id."""
    seconds = f"{2_000_000 + os.getpid()}.25"
    running = asyncio.create_task(launcher.run(box(["sleep", seconds]), 600))
    while not (pids := sleepers(seconds)):
        await asyncio.sleep(0.01)
    return running, pids[0]


def sleepers(seconds):
    """All of this machine that sleep so long."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [int(path.parent.name)] if path.read_bytes() == f"sleep\0{seconds}\0".encode() else []
        except OSError:  # it has just ended
            continue
    return found


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.timeout(300)
def test_all_of_it_holds_for_an_ordinary_user():
    output = run_as_nobody(__file__, "not ordinary_user")
    assert "8 passed, 1 deselected" in output, output
