"""Limits on whole process trees by control groups, v1 as on this machine and v2 in a kernel of its own."""

import errno
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from manege.sandbox import cgroups
from manege.sandbox.launcher import search_path
from manege.sandbox.policy import Policy
from manege.sandbox.probe import probe
from manege.sandbox.spec import Limits, ProcessSpec
from tests.system.cgroup_programs import burn

pytestmark = pytest.mark.anyio

VERSION = cgroups.find()
grouped = pytest.mark.skipif(VERSION is None, reason="this user may make no control groups here")
MB = 1 << 20
PROGRAMS = "tests.system.cgroup_programs"
NOBODY = 65534

HOLD = """
import json, os, signal
from manege.sandbox import cgroups
from manege.sandbox.spec import Limits
with cgroups.limited(Limits(num_processes=10)) as group:
    pid = os.fork()
    if pid == 0:
        os.closerange(1, 100)
        group.enter()
        signal.pause()
    while not open(group.folders[-1] + "/cgroup.procs").read():
        pass
    print(json.dumps([group.folders, pid]), flush=True)
    signal.pause()
"""
ASK = """
import os, sys
from manege.sandbox import cgroups
cgroups.Group(folders=sys.argv[1:]).enter()
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(cgroups.find())
"""
BOOT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /tmp
cd {folder}
export PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp
{python} -c 'from manege.sandbox import cgroups; print("kind of groups:", cgroups.find())'
{python} -m pytest -vv --color=no -p no:cacheprovider -k "not v2_alone" {tests}
halt -f
"""


def spec(folder, program, limits):
    policy = Policy(
        layers=replace(probe(), cgroup=VERSION),
        writable=[str(folder)],
        readable=[],
        private=[],
        tcp_ports=[],
        protected_pids=[],
    )
    return ProcessSpec(
        program=program,
        role="agent",
        env={"PATH": search_path(), "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"},
        cwd=str(folder),
        stdout=str(folder / "stdout"),
        stderr=str(folder / "stderr"),
        limits=limits,
        policy=policy,
    )


@grouped
async def test_memory_is_what_all_processes_use_together(launcher, tmp_path):
    limits = Limits(memory_bytes=130 * MB)
    together = await launcher.run(spec(tmp_path, f"{PROGRAMS}:take_together", limits), 60)
    assert together.limit == "memory"
    roomy = await launcher.run(spec(tmp_path, f"{PROGRAMS}:take_together", Limits(memory_bytes=400 * MB)), 60)
    assert (roomy.code, roomy.limit) == (0, None)


@grouped
@pytest.mark.parametrize("limit", ["memory_bytes", "resident_bytes"])
async def test_memory_that_is_only_reserved_does_not_count(launcher, tmp_path, limit):
    limits = Limits(**{limit: 130 * MB})
    reserved = await launcher.run(spec(tmp_path, f"{PROGRAMS}:reserve", limits), 60)
    assert (reserved.code, reserved.limit) == (0, None)
    taken = await launcher.run(spec(tmp_path, f"{PROGRAMS}:take", limits), 60)
    assert (taken.code, taken.limit) == (None, "memory")


@grouped
async def test_a_shell_tells_that_its_command_had_no_memory(launcher, tmp_path):
    take = f"{sys.executable} -c 'bytearray(b\"x\") * (200 << 20)'; exit $?"
    ended = await launcher.run(spec(tmp_path, ["bash", "-c", take], Limits(memory_bytes=130 * MB)), 60)
    assert (ended.code, ended.limit) == (128 + signal.SIGKILL, "memory")


@grouped
async def test_an_agent_may_outlive_a_child_that_took_too_much(launcher, tmp_path):
    ended = await launcher.run(spec(tmp_path, f"{PROGRAMS}:lose_a_child", Limits(memory_bytes=130 * MB)), 60)
    assert (ended.code, ended.limit) == (0, None)


@grouped
async def test_the_process_over_the_limit_cannot_be_started(launcher, tmp_path):
    ended = await launcher.run(spec(tmp_path, f"{PROGRAMS}:fork_on", Limits(num_processes=5)), 60)
    num_started, error = map(int, (tmp_path / "stdout").read_text().split())
    assert (ended.code, ended.limit, ended.num_left) == (0, None, num_started)
    # 4 tasks for each; itself, and what a PID namespace needs, are among them.
    assert error == errno.EAGAIN
    assert 17 <= num_started <= 19


@grouped
def test_time_of_cores_is_limited():
    with cgroups.limited(Limits(cpus=0.05)) as group:
        pid = os.fork()
        if pid == 0:
            group.enter()
            burn()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        text = Path(group.folders[-1], "cpu.stat").read_text()
    counts = dict(line.split() for line in text.splitlines())
    assert int(counts["nr_throttled"]) > 0


@grouped
async def test_a_group_ends_with_its_attempt(launcher, tmp_path):
    shown = spec(tmp_path, f"{PROGRAMS}:show_groups", Limits(memory_bytes=100 * MB))
    if not shown.policy.layers.namespaces:  # which have a /proc of their own
        shown = replace(shown, policy=replace(shown.policy, readable=["/proc/self/cgroup"]))
    ended = await launcher.run(shown, 60)
    names = set(re.findall(r"manege-\w+", (tmp_path / "stdout").read_text()))
    assert ended.code == 0
    assert len(names) == 1
    assert not list(Path("/sys/fs/cgroup").rglob(names.pop()))


@grouped
def test_only_groups_without_a_supervisor_are_swept():
    with cgroups.limited(Limits()) as living:
        holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
        folders, pid = json.loads(holder.stdout.readline())
        left = os.pidfd_open(pid)
        cgroups.remove_leftovers()
        assert all(Path(folder).exists() for folder in [*folders, *living.folders])
        assert not select.select([left], [], [], 0)[0]
        holder.communicate(holder.kill())
        cgroups.remove_leftovers()
        assert select.select([left], [], [], 30)[0], "what the agent has left is alive"
        os.close(left)
        assert not any(Path(folder).exists() for folder in folders)
        assert all(Path(folder).exists() for folder in living.folders)
    assert not any(Path(folder).exists() for folder in living.folders)


def ask_as_nobody(*folders):
    return subprocess.check_output([sys.executable, "-c", ASK, *folders], text=True)


@grouped
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_has_groups_where_they_are_delegated():
    assert ask_as_nobody() == "None\n"
    with cgroups.limited(Limits()) as group:
        inner = cgroups.Group(folders=[f"{folder}/inner" for folder in group.folders])
        for outer, folder in zip(group.folders, inner.folders, strict=True):
            os.mkdir(folder)
            for owned in (outer, folder):
                os.chown(owned, NOBODY, NOBODY)
                for name in ("cgroup.procs", "cgroup.subtree_control"):
                    if os.path.exists(f"{owned}/{name}"):
                        os.chown(f"{owned}/{name}", NOBODY, NOBODY)
        answer = ask_as_nobody(*inner.folders)
        for folder in inner.folders:
            os.rmdir(folder)
    assert answer == f"{VERSION}\n"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("linux.uml"), reason="needs Debian's user-mode-linux")
def test_all_of_this_holds_in_a_kernel_with_v2_alone(tmp_path):
    start = tmp_path / "init"
    start.write_text(BOOT.format(folder=os.getcwd(), python=sys.executable, tests=__file__))
    start.chmod(0o755)
    kernel = "linux.uml root=/dev/root rootfstype=hostfs rootflags=/ ro mem=1G con=null con0=null,fd:1 quiet"
    booted = subprocess.run(
        [*kernel.split(), f"init={start}"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=580
    )
    assert re.search(r"=== \d+ passed, 1 deselected in", booted.stdout), booted.stdout
    assert "kind of groups: v2" in booted.stdout
