"""What harnesses need of the sandbox beyond a small program, and that it opens no more than that."""

import os
import pty
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from manege.sandbox.spec import Limits
from tests.system.test_sandbox import MB, Box, isolated

pytestmark = [pytest.mark.anyio, isolated]
mounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount on every machine")

LIST_TERMINALS = "import os, pty; name = os.ttyname(pty.openpty()[1]); print(name, sorted(os.listdir('/dev/pts')))"
OWN_MAP = "print(len(open('/proc/self/maps').read()) > 0)"
MAP_OF_PARENT = "import os; print(open(f'/proc/{os.getppid()}/maps').read())"


@pytest.fixture
def run(launcher, tmp_path):
    box = Box(tmp_path)

    async def run_python(code, *, limits=None, **policy):
        spec = box.spec([sys.executable, "-c", code])
        spec = replace(spec, policy=replace(spec.policy, **policy), limits=limits or spec.limits)
        ended = await launcher.run(spec, 30)
        return ended, box.stdout, (tmp_path / "stderr").read_text()

    return run_python


@mounts
async def test_terminals_are_the_programs_own(run):
    outside = [pty.openpty() for _ in range(2)]
    ended, out, err = await run(LIST_TERMINALS, terminals=True)
    for descriptors in outside:
        for descriptor in descriptors:
            os.close(descriptor)
    assert ended.code == 0, err
    assert out == "/dev/pts/0 ['0', 'ptmx']\n"


async def test_there_are_none_unless_asked_for(run):
    ended, _, err = await run(LIST_TERMINALS)
    assert ended.code == 1
    assert "Permission denied" in err or "out of pty devices" in err


@mounts
async def test_a_fixed_folder_is_private(run, tmp_path):
    place, own = Path("/tmp", f"manege-test-{uuid.uuid4().hex}"), tmp_path / "own"
    own.mkdir()
    code = f"import os; open('{place}/kept', 'w').close(); print(os.listdir('{place}'))"
    try:
        ended, out, err = await run(code, folders={str(place): str(own)})
        assert (ended.code, out) == (0, "['kept']\n"), err
        assert (own / "kept").exists()
        assert not place.exists() or list(place.iterdir()) == []
    finally:
        if place.exists():
            place.rmdir()


async def test_a_program_sees_its_own_memory_map_and_no_other(run):
    ended, out, err = await run(OWN_MAP)
    assert (ended.code, out) == (0, "True\n"), err
    ended, _, err = await run(MAP_OF_PARENT)
    assert "Permission denied" in err


async def test_memory_in_use_is_limited_where_address_space_is_not(run):
    code = "import mmap, time; space = mmap.mmap(-1, 4 << 30); {}time.sleep(2); print('done')"
    limits = Limits(resident_bytes=200 * MB)
    ended, out, _ = await run(code.format(""), limits=limits)
    assert (ended.limit, out) == (None, "done\n")
    ended, out, _ = await run(code.format("used = bytearray(b'x') * (400 << 20); "), limits=limits)
    assert (ended.limit, out) == ("memory", "")
