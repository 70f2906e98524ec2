"""Real process trees: what an agent is kept from, how it ends, and that nothing of it stays alive."""

import asyncio
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manege.errors import HarnessError
from manege.sandbox import processes
from manege.sandbox.code import command_paths
from manege.sandbox.launcher import Launcher, search_path
from manege.sandbox.policy import Policy
from manege.sandbox.probe import probe
from manege.sandbox.spec import Limits, ProcessSpec
from tests import programs

pytestmark = pytest.mark.anyio

LAYERS = probe()
BARE = dataclasses.replace(LAYERS, namespaces=False, overlay=False, uids=False, cgroup=None, notify=False)
"""What every machine with Landlock has."""
isolated = pytest.mark.skipif(not LAYERS.isolates, reason="; ".join(LAYERS.missing()))
SCRIPT = str(Path(programs.__file__).absolute())
MB = 1 << 20


class Box:
    """A workspace and the request for a process in it."""

    def __init__(self, folder, layers=LAYERS):
        self.folder = folder
        self.layers = layers
        for name in ("workspace", "scratch"):
            (folder / name).mkdir()
        self.workspace = folder / "workspace"
        self.env = {
            "PATH": search_path(),
            "HOME": str(self.workspace),
            "TMPDIR": str(folder / "scratch"),
            "LANG": "C.UTF-8",
        }

    def spec(self, program, *, env=None, port=1, listen_port=None, uid=None, **changes):
        policy = Policy(
            layers=self.layers,
            writable=[str(self.workspace), str(self.folder / "scratch")],
            readable=[str(self.folder / "task.json")],
            private=[],
            tcp_ports=[port],
            protected_pids=[os.getpid()],
            listen_port=listen_port,
            uid=uid,
        )
        standard = {
            "program": program,
            "role": "agent",
            "env": self.env | (env or {}),
            "cwd": str(self.workspace),
            "stdout": str(self.folder / "stdout"),
            "stderr": str(self.folder / "stderr"),
            "limits": Limits(num_files=256),
            "policy": policy,
        }
        return ProcessSpec(**(standard | changes))

    @property
    def stdout(self):
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self):
        return (self.folder / "stderr").read_text()


@pytest.fixture(params=["namespaces", "bare"])
def box(tmp_path, request):
    if request.param == "namespaces" and not LAYERS.namespaces:
        pytest.skip("; ".join(LAYERS.missing()))
    return Box(tmp_path, LAYERS if request.param == "namespaces" else BARE)


@pytest.fixture
def ports():
    """Two listening ports: the gateway's, and another service of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        yield one.getsockname()[1], two.getsockname()[1]


@isolated
@pytest.mark.parametrize(
    "program", ["tests.programs:try_forbidden", [sys.executable, SCRIPT]], ids=["function", "command"]
)
async def test_an_agent_can_do_its_work_and_nothing_else(launcher, box, ports, program):
    secret = box.folder / "id_ed25519"
    secret.write_text("secret")
    (box.folder / "task.json").write_text("{}")
    env = {
        "OUTSIDE": str(box.folder / "outside"),
        "SECRET": str(secret),
        "CONTROLLER": str(os.getpid()),
        "GATEWAY_PORT": str(ports[0]),
        "OTHER_PORT": str(ports[1]),
        "MANEGE_TASK_FILE": str(box.folder / "task.json"),
        "HOME": str(Path.home()),
    }
    ended = await launcher.run(box.spec(program, env=env, port=ports[0]), 60)
    assert ended.code == 0, box.stderr
    results = json.loads(box.stdout)
    assert results.pop("open descriptors") == [0, 1, 2]
    assert results.pop("environment") == sorted(box.env | env)
    done = {name for name, result in results.items() if result == "done"}
    # With namespaces there are folders of these names, which are others.
    own = {"write outside", "list home", "write the shared scratch folder"} if box.layers.namespaces else set()
    assert done == own | {name for name in results if name.startswith("ok: ")}, results
    assert secret.read_text() == "secret"
    assert not (box.folder / "outside").exists()
    assert not Path("/dev/shm/manege-test").exists()


@isolated
async def test_what_is_private_stays_unreadable_inside_a_readable_folder(launcher, box):
    project = box.folder / "project"
    (project / "deep" / "runs").mkdir(parents=True)
    for name in ("code.txt", "deep/data.txt", "deep/runs/key", "tasks.jsonl"):
        (project / name).write_text(name)
    (box.folder / "secret").write_text("secret")
    (project / "link").symlink_to(box.folder / "secret")
    policy = dataclasses.replace(
        box.spec("").policy, readable=[str(project)], private=[str(project / "deep/runs"), str(project / "tasks.jsonl")]
    )
    script = (
        f"cd {project}; for file in code.txt deep/data.txt deep/runs/key tasks.jsonl link; do cat $file; echo; done"
    )
    await launcher.run(box.spec(["sh", "-c", script], policy=policy), 30)
    assert box.stdout.split() == ["code.txt", "deep/data.txt"]
    assert box.stderr.count("\n") == 3


@isolated
async def test_a_package_in_a_folder_that_is_being_developed_runs_by_its_name(box):
    package = box.folder / "source" / "developed"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("from developed import greeting")
    (package / "greeting.py").write_text("print('hello')")
    launcher = Launcher(import_paths=[*sys.path, str(package.parent)])
    spec = box.spec([sys.executable, "-m", "developed"], env={"PYTHONPATH": str(package.parent)})
    ended = await launcher.run(spec, 30)
    await launcher.close()
    assert (ended.code, box.stdout) == (0, "hello\n"), box.stderr


def test_a_script_in_a_home_folder_opens_nothing_beside_it(tmp_path):
    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    for name in ("agent.py", "other.py", "project/agent.py", "project/other.py", "project/data.txt"):
        (home / name).touch()
    readable, listable = command_paths(["no-such", str(home / "agent.py")], "/usr/bin", home=str(home))
    assert (readable, listable) == ([str(home / "agent.py")], [])
    readable, listable = command_paths(["no-such", str(home / "project" / "agent.py")], "/usr/bin", home=str(home))
    assert set(readable) == {str(home / "project" / "agent.py"), str(home / "project" / "other.py")}
    assert listable == [str(home / "project")]


@pytest.mark.parametrize(
    ("program", "code", "stdout", "stderr"),
    [
        ("tests.programs:greet", 0, "hello you\n", "to stderr\n"),
        ("tests.programs:greet_async", 0, "hello you\n", "to stderr\n"),
        ("tests.programs:in_thread", 0, "thread done\n", ""),
        ("tests.programs:leave_by_code", 7, "", ""),
        ("tests.programs:leave_by_message", 1, "", "no, thanks\n"),
        ("tests.programs:raise_error", 1, "", "RuntimeError: broken on purpose\n"),
        (["sh", "-c", "echo hello $NAME; exit 7"], 7, "hello you\n", ""),
    ],
    ids=["return", "coroutine", "thread", "exit code", "exit message", "exception", "command"],
)
async def test_a_program_ends_as_it_would_by_itself(launcher, box, program, code, stdout, stderr):
    ended = await launcher.run(box.spec(program, env={"NAME": "you"}), 30)
    assert (ended.code, ended.signal, ended.limit, ended.timed_out, ended.num_left) == (code, None, None, False, 0)
    assert box.stdout == stdout
    assert box.stderr.endswith(stderr)


@pytest.mark.parametrize(
    ("function", "limits", "limit"),
    [
        ("exhaust_memory", {"memory_bytes": 2048 * MB}, "memory"),
        ("fill_a_file", {"file_bytes": 8 * MB}, "file size"),
        ("fork_many", {"num_processes": 20}, "processes"),
    ],
)
async def test_a_limit_ends_an_agent_and_is_named(launcher, box, function, limits, limit):
    box.layers = dataclasses.replace(box.layers, cgroup=None)
    ended = await launcher.run(box.spec(f"tests.programs:{function}", limits=Limits(**limits)), 30)
    assert (ended.code, ended.limit, ended.timed_out) == (None, limit, False), box.stderr


async def test_output_beyond_the_limit_is_cut(launcher, box):
    ended = await launcher.run(box.spec("tests.programs:print_a_lot", limits=Limits(output_bytes=MB)), 30)
    assert ended.code == 0
    assert len(box.stdout) == MB


def beats(box):
    return {name: (box.workspace / name).stat().st_size for name in ("setsid", "nohup", "double")}


async def test_daemons_are_dead_when_the_agent_has_ended(launcher, box):
    ended = await launcher.run(box.spec("tests.programs:leave_daemons"), 30)
    before = beats(box)
    assert ended.code == 0
    assert ended.num_left >= 3
    await asyncio.sleep(0.2)
    assert beats(box) == before


async def test_daemons_are_dead_when_the_time_is_up(launcher, box):
    await launcher.check("tests.programs:leave_daemons_and_wait", role="agent")
    ended = await launcher.run(box.spec("tests.programs:leave_daemons_and_wait"), 2)
    before = beats(box)
    assert (ended.timed_out, ended.code) == (True, None)
    await asyncio.sleep(0.2)
    assert beats(box) == before


async def test_a_cancelled_run_leaves_no_process(launcher, box):
    task = asyncio.create_task(launcher.run(box.spec("tests.programs:leave_daemons_and_wait"), 30))
    while not all((box.workspace / name).exists() for name in ("setsid", "nohup", "double")):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = beats(box)
    await asyncio.sleep(0.2)
    assert beats(box) == before


CONTROLLER = """
import asyncio, pickle, sys
from manege.sandbox import processes
from manege.sandbox.launcher import Launcher

async def main():
    await Launcher().run(pickle.load(sys.stdin.buffer), 60)

asyncio.run(main())
"""


async def test_agents_die_with_a_controller_that_is_killed(box):
    with subprocess.Popen([sys.executable, "-c", CONTROLLER], stdin=subprocess.PIPE) as controller:
        controller.stdin.write(pickle.dumps(box.spec("tests.programs:leave_daemons_and_wait")))
        controller.stdin.close()
        while not all((box.workspace / name).exists() for name in ("setsid", "nohup", "double")):
            await asyncio.sleep(0.01)
        controller.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    before = None
    while beats(box) != before:
        assert time.monotonic() < deadline_s
        before = beats(box)
        await asyncio.sleep(0.2)


async def test_a_function_gets_arguments_and_its_value_comes_back(launcher, box):
    spec = box.spec("tests.programs:add", role="scorer", policy=None, args=(0.1, 0.2), replies=True)
    assert json.loads((await launcher.run(spec, 30)).reply) == 0.1 + 0.2


async def test_forks_of_one_parent_draw_different_numbers(launcher, box):
    spec = box.spec("tests.programs:draw", policy=None, replies=True)
    assert len({(await launcher.run(spec, 30)).reply for _ in range(3)}) == 3


async def test_a_command_reads_its_input(launcher, box):
    ended = await launcher.run(box.spec(["cat"], stdin=b"some input"), 30)
    assert (ended.code, box.stdout) == (0, "some input")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (["no-such-command"], "agent: command 'no-such-command' does not exist"),
        ([], "the command is an empty list"),
        ("no_such_module:main", "module 'no_such_module' cannot be imported"),
        ("tests.programs:no_such_function", "has no function 'no_such_function'"),
        ("main", "want module:function"),
        ("broken_on_import:main", r"fails while it is imported \(KeyError: 'OPENAI_API_KEY'\).*inside the function"),
        ("threads_on_import:main", "starts threads while it is imported"),
    ],
)
async def test_a_program_that_cannot_be_started_is_named(tmp_path, program, message):
    (tmp_path / "broken_on_import.py").write_text("import os\nos.environ['OPENAI_API_KEY']\n")
    (tmp_path / "threads_on_import.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "def main(): pass\n"
    )
    launcher = Launcher(import_paths=[*sys.path, str(tmp_path)])
    with pytest.raises(HarnessError, match=message):
        await launcher.check(program, role="agent")
    await launcher.close()


async def test_a_command_that_goes_missing_is_an_error_of_the_harness(launcher, box):
    with pytest.raises(HarnessError, match="could not be started: FileNotFoundError"):
        await launcher.run(box.spec(["no-such-command"]), 30)


async def test_an_agent_without_a_folder_to_start_in_is_an_error_of_the_harness(launcher, box):
    with pytest.raises(HarnessError, match="could not be started: FileNotFoundError"):
        await launcher.run(box.spec("tests.programs:greet", cwd=str(box.folder / "none")), 30)


async def test_a_warm_parent_that_was_killed_is_replaced(launcher, box):
    await launcher.check("tests.programs:nothing", role="agent")
    (task,) = launcher._parents.values()
    parent = await task
    parent._popen.kill()
    parent._popen.wait()
    assert (await launcher.run(box.spec("tests.programs:nothing"), 30)).code == 0


async def test_a_scan_of_all_processes_finds_the_same_descendants():
    with subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60 & wait"]) as shell:
        while len(processes._listed_children(shell.pid)) < 2:
            await asyncio.sleep(0.01)
        listed = sorted(processes._listed_children(shell.pid))
        assert sorted(processes._scanned_children()(shell.pid)) == listed
        for pid in [*listed, shell.pid]:
            os.kill(pid, signal.SIGKILL)
