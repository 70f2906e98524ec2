"""Inside namespaces: nothing answers but the socket that was handed out, and nothing else is to be seen or left."""

import asyncio
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from manege.errors import HarnessError
from manege.sandbox import processes, uids
from manege.sandbox.spec import Overlay
from tests.ordinary_user import run_as_nobody
from tests.system.test_sandbox import LAYERS, Box

PORT = 8400
ALLOWED = not subprocess.run(["unshare", "-Umpnui", "--map-root-user", "--fork", "--mount-proc", "true"]).returncode
pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not ALLOWED, reason="this machine allows no user namespaces")]
HERE = "tests.system.namespace_programs:"


def test_namespaces_are_found_where_the_machine_allows_them():
    assert LAYERS.namespaces
    assert "no namespaces" not in "".join(LAYERS.missing())


@pytest.fixture
def lease():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def run(launcher, tmp_path, lease):
    """What a program of `namespace_programs`, or a command, found."""
    box = Box(tmp_path)
    uid = None
    if LAYERS.uids:
        uid = lease.enter_context(uids.lease())
        uids.own([str(box.workspace), str(tmp_path / "scratch")], uid)

    async def run_it(program, *, env=None, on_listener=None, **policy):
        program = HERE + program if isinstance(program, str) else program
        spec = box.spec(program, env=env, listen_port=PORT, uid=uid)
        spec = replace(spec, policy=replace(spec.policy, **policy))
        ended = await launcher.run(spec, 60, on_listener=on_listener)
        assert ended.code == 0, box.stderr
        return json.loads(box.stdout) if isinstance(program, str) else box.stdout

    run_it.box = box
    return run_it


def answer(server, text):
    """Serve one connection after another until the socket is closed."""

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(100)
                connection.sendall(text.encode() + b"\n")

    threading.Thread(target=serve, daemon=True).start()


@contextmanager
def answering(family, address):
    server = socket.socket(family)
    with server:
        server.bind(address)
        server.listen()
        answer(server, "a way out")
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)


def own_addresses():
    """Of the network interfaces of this machine, and of its router."""
    lines = subprocess.check_output(["ip", "-o", "-4", "addr"], text=True).splitlines()
    return [line.split()[3].partition("/")[0] for line in lines]


def router():
    words = subprocess.check_output(["ip", "route", "show", "default"], text=True).split()
    return words[words.index("via") + 1] if "via" in words else None


async def test_nothing_answers_but_the_socket_that_was_handed_out(run, tmp_path):
    handed = []

    def take(listener):
        handed.append(listener)
        answer(listener, "the gateway")

    abstract = f"\0manege-{uuid.uuid4().hex}"
    path = f"/tmp/manege-{uuid.uuid4().hex[:8]}.sock"
    with ExitStack() as stack:
        _, port = stack.enter_context(answering(socket.AF_INET, ("0.0.0.0", 0)))
        targets = {f"host at {host}": (socket.AF_INET, (host, port)) for host in own_addresses()}
        assert targets
        if socket.has_dualstack_ipv6():
            _, port6, *_ = stack.enter_context(answering(socket.AF_INET6, ("::1", 0)))
            targets["host at ::1"] = (socket.AF_INET6, ("::1", port6))
        stack.enter_context(answering(socket.AF_UNIX, abstract))
        stack.enter_context(answering(socket.AF_UNIX, path))
        stack.callback(os.unlink, path)
        targets |= {"abstract": (socket.AF_UNIX, abstract), "path": (socket.AF_UNIX, path)}
        targets |= {f"router {host}": (socket.AF_INET, (host, port)) for host in [router()] if host}
        targets["metadata"] = (socket.AF_INET, ("169.254.169.254", 80))
        targets["other loopback"] = (socket.AF_INET, ("127.0.0.2", PORT))
        targets["loopback by IPv6"] = (socket.AF_INET6, ("::1", PORT))
        targets["gateway"] = (socket.AF_INET, ("127.0.0.1", PORT))
        targets["gateway by name"] = (socket.AF_INET, ("localhost", PORT))
        found = await run("reach", env={"TARGETS": json.dumps(targets)}, on_listener=take)
    (listener,) = handed
    assert listener.getsockname() == ("127.0.0.1", PORT)
    listener.close()
    answered = {name for name, result in found.items() if not result.startswith("no: ")}
    assert answered == {"gateway", "gateway by name"}, found
    assert found["gateway"] == "the gateway"


async def test_a_listener_that_nobody_wants_is_closed_and_without_a_port_nothing_listens(run):
    targets = {"gateway": (socket.AF_INET, ("127.0.0.1", PORT))}
    env = {"TARGETS": json.dumps(targets)}
    assert (await run("reach", env=env))["gateway"] == "no: ECONNREFUSED"
    handed = []
    found = await run("reach", env=env, on_listener=handed.append, listen_port=None, tcp_ports=[])
    assert (found["gateway"], handed) == ("no: ECONNREFUSED", [])


async def test_tools_that_need_sockets_and_processes_of_their_own_work(run):
    found = await run("work", env={"HOME": "/tmp"})
    assert found == {
        "unix": "pong",
        "abstract unix": "pong",
        "tcp": "pong",
        "tcp6": "pong",
        "localhost": "127.0.0.1",
        "multiprocessing": "queued",
        "asyncio": "through cat",
        "temporary file": str(run.box.folder / "scratch"),
        "/tmp": "done",
        "TMPDIR is /tmp": "True",
        "user": "uid=1000(agent) gid=1000(agent) groups=1000(agent)",
        "processors": "True",
        "memory": "MemTotal",
        "shell": "42\n",
        "/dev/stderr": "done",
    }


@pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")
async def test_a_terminal_multiplexer_works(run):
    session = "echo from tmux > out; tmux wait-for -S done; cat"
    script = f"tmux new-session -d '{session}' && tmux wait-for done && cat out && tmux kill-server"
    out = await run(["sh", "-c", script], env={"TERM": "xterm", "SHELL": "/bin/sh"}, terminals=True)
    assert out == "from tmux\n"


async def test_no_other_process_can_be_seen_or_looked_into(run):
    found = await run("look_at_others", env={"OUTSIDE": str(os.getpid())})
    assert found.pop("pids") == "1 2"
    assert found.pop("signal it and one outside") == "no: ESRCH"
    assert set(found.values()) <= {"no: EACCES", "no: EPERM"}, found


async def test_the_system_is_bare_read_only_and_gives_no_power(run):
    outside = {os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "mnt", "net", "pid", "user", "uts")}
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    home = pwd.getpwuid(os.getuid()).pw_dir
    found = await run("look_at_the_system", env={"REAL_HOME": home})
    assert not outside & set(found.pop("namespaces").split())
    devices = ["fd", "full", "null", "ptmx", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"]
    assert found.pop("list devices").split() == devices
    system = {"bin", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "sbin", "sys", "tmp", "usr"}
    code = {Path(path).parts[1] for path in (sys.prefix, sys.base_prefix, __file__)}
    assert set(found.pop("list root").split()) <= system | code
    # Of the user's home there is at most the way to the interpreter.
    assert found.pop("list home").split() in (["no:", "ENOENT"], way_to_interpreter(home))
    assert found.pop("name") == "sandbox"
    assert found.pop("hosts") == "127.0.0.1 localhost\n::1 localhost\n"
    assert set(found.pop("capabilities").split()) == {"0" * 16}
    assert found.pop("no new privileges") == "1"
    assert set(json.loads(found.pop("groups"))) <= {1000, 65534}
    for path in ("/file", "/usr/file", "/etc/passwd", "/dev/file", "/proc/sys/kernel/core_pattern"):
        assert found.pop(f"write {path}") == "no: EROFS"
    assert [result for result in found.values() if not result.startswith("no: ")] == [], found
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


async def test_a_workspace_in_shared_memory_is_there_and_nothing_else_of_it(launcher):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, tempfile.NamedTemporaryFile(dir="/dev/shm"):
        box = Box(Path(folder))
        script = "echo kept > file; echo mine > /dev/shm/own; ls /dev/shm | grep -v own"
        ended = await launcher.run(box.spec(["sh", "-c", script], listen_port=PORT), 30)
        assert (ended.code, box.stdout) == (0, f"{Path(folder).name}\n"), box.stderr
        assert (box.workspace / "file").read_text() == "kept\n"
    assert not Path("/dev/shm/own").exists()


def way_to_interpreter(home):
    relative = os.path.relpath(sys.base_prefix, home)
    return [] if relative.startswith("..") else [relative.partition("/")[0]]


KINDS = ["double fork", "nohup", "setsid", "deaf", "server", "stopped", "respawner", "threads"]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_left_behind_is_dead_when_run_returns(launcher, tmp_path, kind):
    box, token = Box(tmp_path), uuid.uuid4().hex
    ended = await launcher.run(box.spec(HERE + "leave", env={"KIND": kind, "TOKEN": token}, listen_port=PORT), 30)
    assert (box.stdout, ended.code) == ("up\n", 0), box.stderr
    assert ended.num_left >= 1
    assert alive(token) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_left_behind_dies_with_the_time(launcher, tmp_path, kind):
    box, token = Box(tmp_path), uuid.uuid4().hex
    spec = box.spec(HERE + "leave_and_wait", env={"KIND": kind, "TOKEN": token}, listen_port=PORT)
    await launcher.check(spec.program, role="agent")
    running = asyncio.create_task(launcher.run(spec, 30))
    while not (tmp_path / "stdout").exists() or not box.stdout:
        await asyncio.sleep(0.01)
    assert alive(token) != [] or kind == "respawner"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert alive(token) == []


async def test_what_runs_dies_with_its_supervisor(launcher, tmp_path):
    # Without a group of its own: a warm parent that starts meanwhile would remove that, with what is in it.
    box, token = Box(tmp_path, replace(LAYERS, cgroup=None)), uuid.uuid4().hex
    spec = box.spec(HERE + "leave_and_wait", env={"KIND": "deaf", "TOKEN": token}, listen_port=PORT)
    await launcher.check(spec.program, role="agent")
    (opening,) = launcher._parents.values()
    running = asyncio.create_task(launcher.run(spec, 30))
    while not (tmp_path / "stdout").exists() or not box.stdout:
        await asyncio.sleep(0.01)
    (supervisor,) = processes._listed_children((await opening)._popen.pid)
    os.kill(supervisor, signal.SIGKILL)
    with pytest.raises(HarnessError, match="its supervisor was killed"):
        await running
    async with asyncio.timeout(10):
        while alive(token):
            await asyncio.sleep(0.01)


def alive(token):
    """Processes of this machine with these letters among their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has just ended
            continue
    return found


async def test_the_network_of_the_machine_can_be_left_open(run):
    with (
        answering(socket.AF_INET, ("127.0.0.1", 0)) as address,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("127.0.0.1", 0))
        code = (
            "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
            f"s.sendto(b'datagram', {udp.getsockname()}); c = socket.create_connection({address}); c.sendall(b'x'); "
            "print(c.makefile().read(), open('/etc/hosts').read() == open('/etc/hosts').read())\n"
            "try: socket.socket(socket.AF_UNIX)\nexcept OSError as error: print(error.errno)"
        )
        out = await run([sys.executable, "-c", code], host_network=True, listen_port=None, tcp_ports=[])
        assert udp.recv(100) == b"datagram"
    assert out.split("\n") == ["a way out", " True", "97", ""]


@pytest.mark.skipif(not LAYERS.overlay, reason="no overlays here")
@pytest.mark.parametrize("sandboxed", [True, False], ids=["sandboxed", "of the user's own"])
async def test_an_overlay_shows_a_folder_and_keeps_the_changes_apart(launcher, tmp_path, sandboxed):
    box = Box(tmp_path)
    lowers = [tmp_path / "a:b,c\\d", tmp_path / "lower2"]
    for folder in (*lowers, tmp_path / "upper", tmp_path / "work"):
        folder.mkdir()
    for name in ("kept", "edited", "removed"):
        (lowers[1] / name).write_text(name)
    (lowers[0] / "kept").write_text("on top")
    shown = Overlay(
        place=str(box.workspace),
        lower=[str(path) for path in lowers],
        upper=str(tmp_path / "upper"),
        work=str(tmp_path / "work"),
    )
    script = "cat kept edited removed; echo more >> edited; rm removed; mkdir sub; echo new > sub/new; ls"
    spec = box.spec(["sh", "-c", script], overlay=shown, listen_port=PORT)
    spec = spec if sandboxed else replace(spec, policy=None)
    for folder in (tmp_path / "upper", tmp_path / "work"):
        assert list(folder.iterdir()) == []
    ended = await launcher.run(spec, 30)
    assert (ended.code, box.stdout) == (0, "on topeditedremovededited\nkept\nsub\n"), box.stderr
    assert list(box.workspace.iterdir()) == []
    assert [path.read_text() for path in sorted(lowers[1].iterdir())] == ["edited", "kept", "removed"]
    assert (tmp_path / "upper" / "edited").read_text() == "editedmore\n"
    assert (tmp_path / "upper" / "sub" / "new").read_text() == "new\n"


FORBIDDEN = """
from manege.sandbox import seccomp
from manege.sandbox.probe import probe
from manege.sandbox.syscalls import ARCH, PR_SET_NO_NEW_PRIVS, prctl
prctl(PR_SET_NO_NEW_PRIVS, 1)
seccomp.install(seccomp.build_filter(ARCH, protected_pids=[], unix=True))
layers = probe()
print(layers.namespaces, layers.overlay, layers.isolates)
"""


def test_where_a_container_forbids_namespaces_the_other_layers_are_left():
    out = subprocess.check_output([sys.executable, "-c", FORBIDDEN], text=True)
    assert out == "False False True\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_all_of_it_holds_for_an_ordinary_user():
    output = run_as_nobody(__file__, "not ordinary_user and not double and not deaf")
    assert " passed" in output, output
    assert " failed" not in output, output
    assert " skipped" not in output, output
