"""What agents try is seen, whatever way they try it, and nothing is held against those that work."""

import asyncio
import dataclasses
import os
import select
import signal

import pytest

from manege.errors import HarnessError
from manege.sandbox import watch
from manege.sandbox.launcher import search_path
from manege.sandbox.policy import Policy
from manege.sandbox.probe import probe
from manege.sandbox.spec import Limits, ProcessSpec, Seen
from tests.ordinary_user import run_as_nobody

LAYERS = probe()
pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not watch.available(), reason="no seccomp user notification here")]
PROGRAMS = "tests.system.watch_programs"
TREES = ["plain", *(["namespaces"] if LAYERS.namespaces else [])]


@pytest.fixture(params=TREES)
def spec(request, tmp_path):
    """A request for a process, by its program."""
    for name in ("run/attempt/workspace", "run/attempt/scratch"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run/secret").touch()
    workspace, scratch = (str(tmp_path / "run/attempt" / name) for name in ("workspace", "scratch"))
    layers = dataclasses.replace(LAYERS, namespaces=request.param == "namespaces", notify=True, cgroup=None)

    def make(program, **changes):
        policy = Policy(
            layers=layers,
            writable=[workspace, scratch],
            readable=[],
            private=[str(tmp_path / "run")],
            tcp_ports=[] if layers.namespaces else [1],
            protected_pids=[os.getpid()],
        )
        return ProcessSpec(
            program=program,
            role="agent",
            env={"PATH": search_path(), "HOME": workspace, "TMPDIR": scratch, "SECRET": str(tmp_path / "run/secret")},
            cwd=workspace,
            stdout=str(tmp_path / "stdout"),
            stderr=str(tmp_path / "stderr"),
            limits=Limits(),
            policy=dataclasses.replace(policy, **changes),
        )

    return make


def found(ended):
    return {(seen.kind, seen.detail): (seen.count, seen.flags) for seen in ended.seen}


@pytest.mark.parametrize("program", ["cheat", "cheat_in_the_background"])
async def test_what_an_agent_tries_is_seen_with_how_often_and_whether_it_flags(launcher, spec, tmp_path, program):
    ended = await launcher.run(spec(f"{PROGRAMS}:{program}"), 60)
    assert ended.code == 0, (tmp_path / "stderr").read_text()
    assert found(ended) == {
        ("file", str(tmp_path / "run/secret")): (2, True),
        ("file", "/etc/shadow"): (1, True),
        ("file", "/proc/1/environ"): (1, True),
        ("file", f"write {tmp_path}/run/attempt/workspace/sitecustomize.py"): (1, True),
        ("network", "connect to 192.0.2.1 port 443"): (1, True),
        ("network", "connect to 2001:db8::1 port 443"): (1, True),
        ("git", "git log --all"): (1, True),
        ("packages", "pip install --retries 0 six"): (1, False),
    }
    assert [seen.flags for seen in ended.seen] == [True] * 7 + [False]


async def test_a_command_is_seen_like_a_function(launcher, spec, tmp_path):
    script = "cat /etc/shadow; curl -m 1 http://192.0.2.1/x; cat words.txt"
    ended = await launcher.run(spec(["sh", "-c", script]), 60)
    assert found(ended) == {
        ("file", "/etc/shadow"): (1, True),
        ("network", "curl -m 1 http://192.0.2.1/x"): (1, True),
        ("network", "connect to 192.0.2.1 port 80"): (1, True),
    }


async def test_nothing_is_held_against_who_works(launcher, spec, tmp_path):
    ended = await launcher.run(spec(f"{PROGRAMS}:work"), 60)
    assert (ended.code, ended.seen) == (0, []), (tmp_path / "stderr").read_text()


async def test_nothing_is_seen_without_the_layer(launcher, spec):
    request = spec(f"{PROGRAMS}:cheat")
    blind = dataclasses.replace(request.policy, layers=dataclasses.replace(request.policy.layers, notify=False))
    assert (await launcher.run(dataclasses.replace(request, policy=blind), 60)).seen == []


async def test_who_waits_for_the_supervisor_is_killed_like_others(launcher, spec):
    ended = await launcher.run(spec(f"{PROGRAMS}:open_for_ever"), 1)
    assert (ended.timed_out, ended.signal) == (True, signal.SIGKILL)


async def test_signals_neither_fail_nor_repeat_what_is_watched(launcher, spec, tmp_path):
    ended = await launcher.run(spec(f"{PROGRAMS}:open_under_signals"), 60)
    assert ended.code == 0, (tmp_path / "stderr").read_text()
    assert found(ended) == {("file", "/etc/shadow"): (int((tmp_path / "stdout").read_text()), True)}


async def test_wrong_addresses_fail_as_ever(launcher, spec, tmp_path):
    ended = await launcher.run(spec(f"{PROGRAMS}:wild_pointers"), 60)
    assert (ended.code, ended.seen) == (0, [])
    assert (tmp_path / "stdout").read_text() == "[-1, -1, -1, -1]\n"


async def test_a_flood_leaves_the_most_frequent_of_bounded_number(launcher, spec):
    ended = await launcher.run(spec(f"{PROGRAMS}:flood"), 60)
    assert len(ended.seen) == 100
    assert ended.seen[0] == Seen(kind="file", detail="/etc/ssh/0_key", count=6, flags=True)


@pytest.mark.parametrize("spec", ["plain"], indirect=True)  # in namespaces it sees no process but its own
async def test_an_agent_without_its_supervisor_dies(launcher, spec, tmp_path):
    """Instead of waiting for an answer for ever."""
    request = spec(f"{PROGRAMS}:tell_supervisor")
    running = asyncio.create_task(launcher.run(request, 60))
    told = tmp_path / "run/attempt/workspace/told"
    while not told.exists():
        await asyncio.sleep(0.01)
    supervisor, agent = map(int, told.read_text().split())
    watched = os.pidfd_open(agent)
    os.kill(supervisor, signal.SIGKILL)
    with pytest.raises(HarnessError, match="its supervisor was killed"):
        await running
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    assert await asyncio.to_thread(poll.poll, 30_000)
    os.close(watched)


async def test_start_up_says_why_a_watched_program_cannot_start(launcher, spec):
    with pytest.raises(HarnessError, match="No such file or directory"):
        await launcher.run(spec(["no-such-program"]), 60)


def test_the_same_as_an_ordinary_user():
    tests = "is_seen_with or like_a_function or held_against or wrong_addresses"
    output = run_as_nobody(__file__, tests)
    assert f"{6 * len(TREES)} passed" in output, output
