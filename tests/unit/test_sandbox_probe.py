"""When a run may start, and what is said about layers that are missing."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from manege.cli.parts import check_agents
from manege.config import RunConfig, SandboxConfig
from manege.errors import SandboxError
from manege.sandbox.layers import Layers
from manege.sandbox.probe import probe, require
from manege.types import Task

FULL = Layers(system="linux", landlock_abi=7, seccomp=True)
APART = replace(FULL, namespaces=True)
BOXED = replace(FULL, bubblewrap=True)
NO_LANDLOCK = Layers(system="linux", landlock_abi=0, seccomp=True)
NO_SECCOMP = Layers(system="linux", landlock_abi=7, seccomp=False)
MACOS = Layers(system="darwin", landlock_abi=0, seccomp=False)
WINDOWS = Layers(system="win32", landlock_abi=0, seccomp=False)


@pytest.mark.parametrize(
    ("layers", "config", "enforced"),
    [
        (FULL, {}, FULL),
        (APART, {}, APART),
        (APART, {"mode": "strict"}, APART),
        (BOXED, {"mode": "strict"}, BOXED),
        (APART, {"mode": "off", "unsafe": True}, Layers(system="linux", landlock_abi=0, seccomp=False)),
        (NO_LANDLOCK, {"unsafe": True}, NO_LANDLOCK),
        (FULL, {"mode": "off", "unsafe": True}, Layers(system="linux", landlock_abi=0, seccomp=False)),
        (MACOS, {"unsafe": True}, MACOS),
    ],
    ids=[
        "full",
        "apart",
        "strict",
        "strict, bubblewrap",
        "off though apart",
        "no landlock, accepted",
        "off, accepted",
        "macos, accepted",
    ],
)
def test_what_is_enforced(layers, config, enforced):
    assert require(SandboxConfig(**config), layers) == enforced


@pytest.mark.parametrize(
    ("layers", "config", "message"),
    [
        (NO_LANDLOCK, {}, "no Landlock.*--unsafe"),
        (NO_SECCOMP, {}, "no seccomp.*--unsafe"),
        (MACOS, {}, "no isolation on darwin.*--unsafe"),
        (FULL, {"mode": "off"}, "sandbox.mode is off.*--unsafe"),
        (FULL, {"mode": "strict", "unsafe": True}, "strict.*lacks layers: no namespaces"),
        (replace(APART, seccomp=False), {"mode": "strict"}, "strict.*no seccomp"),
        (replace(APART, landlock_abi=0), {"mode": "strict"}, "strict.*no Landlock"),
        (WINDOWS, {"unsafe": True}, "wsl --install"),
    ],
    ids=[
        "no landlock",
        "no seccomp",
        "macos",
        "off",
        "strict, no namespaces",
        "strict, no seccomp",
        "strict, no landlock",
        "windows",
    ],
)
def test_a_run_without_isolation_is_refused(layers, config, message):
    with pytest.raises(SandboxError, match=message):
        require(SandboxConfig(**config), layers)


@pytest.mark.parametrize(
    ("layers", "lines"),
    [
        (replace(APART, cgroup="v2", notify=True), []),
        (replace(BOXED, cgroup="v1", notify=True), []),
        (APART, ["no cgroup", "no seccomp notification"]),
        (FULL, ["no namespaces", "no cgroup", "no seccomp notification"]),
        (replace(FULL, landlock_abi=5, cgroup="v1", notify=True), ["Landlock 5 < 6", "no namespaces"]),
        (
            replace(FULL, landlock_abi=2, cgroup="v1", notify=True),
            ["Landlock 2 < 3", "Landlock 2 < 4", "Landlock 2 < 6", "no namespaces"],
        ),
        (replace(APART, landlock_abi=2, cgroup="v1", notify=True), ["Landlock 2 < 3"]),
        (replace(NO_LANDLOCK, cgroup="v1", notify=True), ["no Landlock", "no namespaces"]),
        (replace(APART, seccomp=False, cgroup="v1", notify=True), ["no seccomp"]),
    ],
    ids=["all", "bubblewrap", "user", "full", "5", "2", "2 with namespaces", "no landlock", "no seccomp"],
)
def test_each_missing_layer_has_a_line(layers, lines):
    missing = layers.missing()
    assert [line.partition(":")[0] for line in missing] == lines
    assert all("agents can" in line or "agents run" in line for line in missing)


def test_what_is_there_is_named_in_the_record():
    layers = replace(APART, cgroup="v1", uids=True, notify=True)
    there = ["landlock 7", "seccomp", "namespaces", "cgroup v1", "user id", "notification"]
    assert layers.names() == ["process tree", "clean environment", "limits", *there]


def test_what_is_not_isolated_is_said_in_calm_lines():
    config = RunConfig.model_validate(
        {
            "name": "run",
            "tasks": {"train": "t.jsonl"},
            "agent": {"run": ["true"]},
            "scorer": {"run": ["true"]},
            "sandbox": {"unsafe": True},
        }
    )
    said = io.StringIO()
    check_agents(config, [Task(id="t", input={})], Console(file=said))
    assert said.getvalue().splitlines() == [f"sandbox: {line}" for line in probe().missing()]


# As far as another system can be played here: the platform's name, and the modules that Windows lacks.
ELSEWHERE = """
import asyncio, sys
import httpx, pydantic, rich.console, sqlalchemy, starlette, uvicorn
sys.platform = {platform!r}
for name in {lacking!r}:
    sys.modules[name] = None
from manege.cli.main import main
sys.exit(main({arguments!r}))
"""


def manege_on(platform, *arguments, lacking=()):
    code = ELSEWHERE.format(platform=platform, lacking=lacking, arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_native_windows_is_refused_with_the_way_through_wsl():
    done = manege_on("win32", "doctor", lacking=["fcntl", "resource", "pwd"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "wsl --install" in done.stderr


def test_macos_lacks_isolation_and_needs_unsafe(tmp_path):
    run = ["run", "tests/tiny/run.toml", f"folder={tmp_path}"]
    refused = manege_on("darwin", *run)
    assert refused.returncode == 2
    assert "no isolation on darwin" in refused.stderr
    assert "--unsafe" in refused.stderr
    accepted = manege_on("darwin", *run, "--unsafe", "agent.run=['no-such-agent']")
    assert "sandbox: no isolation on darwin" in accepted.stdout
    assert "command 'no-such-agent' does not exist" in accepted.stderr


def test_what_the_standard_streams_are_hides_no_layer(tmp_path):
    ask = [sys.executable, "-c", "from manege.sandbox.probe import probe; print(probe())"]
    with open(tmp_path / "answer", "w+") as file:
        subprocess.run(ask, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=True)
        file.seek(0)
        assert file.read() == subprocess.run(ask, stdin=subprocess.PIPE, capture_output=True, text=True).stdout
