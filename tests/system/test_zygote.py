"""The warm parent is clean: a fork of it finds nothing of the controller, nor of the attempts before and beside it."""

import asyncio
import json
import os
import uuid

import pytest

from manege.sandbox.launcher import Launcher, search_path
from manege.sandbox.spec import Limits, ProcessSpec

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="reads its memory through /proc"),
]

PROGRAMS = "tests.system.zygote_programs"
NOTHING = {"environ": [], "variables": [], "memory": [], "files": []}


@pytest.fixture
def secrets(tmp_path):
    """In the environment, memory and an open file of this process, which plays the controller."""
    named, held, written = (f"zygote-secret-{uuid.uuid4().hex}" for _ in range(3))
    (tmp_path / "keys").write_text(written)
    with open(tmp_path / "keys") as file:
        os.set_inheritable(file.fileno(), True)
        os.environ["MANEGE_TEST_SECRET"] = named
        yield [named, held, file.read()]
        del os.environ["MANEGE_TEST_SECRET"]


@pytest.fixture
async def launcher(secrets):
    opened = Launcher()
    yield opened
    await opened.close()


def spec(folder, function, **env):
    folder.mkdir()
    return ProcessSpec(
        program=f"{PROGRAMS}:{function}",
        role="agent",
        env={"PATH": search_path(), "HOME": str(folder)} | env,
        cwd=str(folder),
        stdout=str(folder / "stdout"),
        stderr=str(folder / "stderr"),
        limits=Limits(),
        policy=None,
    )


async def found(launcher, request):
    ended = await launcher.run(request, 60)
    with open(request.stdout) as file, open(request.stderr) as error:
        assert ended.code == 0, error.read()
        return json.load(file)


async def test_a_fork_finds_no_secret_of_the_controller(launcher, tmp_path):
    assert await found(launcher, spec(tmp_path / "a", "search")) == NOTHING


async def test_the_search_finds_what_there_is(launcher, tmp_path):
    own = f"zygote-secret-{uuid.uuid4().hex}"
    seen = await found(launcher, spec(tmp_path / "a", "keep_and_search", KEY=own))
    kept = f"zygote-secret-{'ab' * 16}"
    assert seen["variables"] == [own]
    assert {own, kept} <= {*seen["memory"]}


async def test_a_fork_finds_no_secret_of_another_attempt(launcher, tmp_path):
    before, beside = (f"zygote-secret-{uuid.uuid4().hex}" for _ in range(2))
    await found(launcher, spec(tmp_path / "before", "search", KEY=before))
    running = asyncio.create_task(launcher.run(spec(tmp_path / "beside", "search", KEY=beside, WAIT="yes"), 60))
    while not (tmp_path / "beside" / "waiting").exists():
        await asyncio.sleep(0.01)
    seen = await found(launcher, spec(tmp_path / "a", "search"))
    running.cancel()
    await asyncio.wait([running])
    assert seen == NOTHING
