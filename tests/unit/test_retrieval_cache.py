"""An index folder is complete or absent, and built once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from manege.errors import ConfigError
from manege.recipes.search.retrieval.cache import built_once, fingerprint

KILLED = """
import os, signal, sys
from pathlib import Path
from manege.recipes.search.retrieval.cache import built_once

def build(folder):
    (folder / "data").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

built_once(Path(sys.argv[1]), build)
"""

BUILDING = """
import sys
from pathlib import Path
from manege.recipes.search.retrieval.cache import built_once

def build(folder):
    print("building", flush=True)
    sys.stdin.readline()
    (folder / "data").write_text("whole")

built_once(Path(sys.argv[1]), build)
print("built", flush=True)
"""


def waits_for_a_lock(process):
    """Or has gone on without."""
    return process.poll() is not None or re.search(rf"-> FLOCK .* {process.pid} ", Path("/proc/locks").read_text())


def writing(text, built):
    def build(folder):
        assert not any(folder.iterdir())
        (folder / "data").write_text(text)
        built.append(text)

    return build


def test_a_folder_is_built_once(tmp_path):
    built, folder = [], tmp_path / "new" / "index"
    for text in "ab":
        built_once(folder, writing(text, built))
    assert (folder / "data").read_text() == "a"
    assert built == ["a"]


def test_what_a_killed_build_left_is_not_used(tmp_path):
    folder = tmp_path / "index"
    code = subprocess.run([sys.executable, "-c", KILLED, folder], timeout=60).returncode
    assert code == -9
    assert not folder.exists()
    built_once(folder, writing("whole", []))
    assert (folder / "data").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["index"]


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="who waits for a lock is told by Linux only")
def test_who_comes_while_another_builds_waits_and_uses_what_it_made(tmp_path):
    command = [sys.executable, "-c", BUILDING, tmp_path / "index"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "building\n"
        second = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        while not waits_for_a_lock(second):
            os.sched_yield()
        first.communicate("go\n", timeout=60)
        assert second.communicate(timeout=60)[0] == "built\n"


@pytest.mark.parametrize(
    "damage", [lambda file: file.write_text("cu"), lambda file: file.unlink()], ids=["cut", "gone"]
)
def test_a_damaged_folder_is_built_again(tmp_path, damage):
    folder = tmp_path / "index"
    built_once(folder, writing("whole", []))
    damage(folder / "data")
    built_once(folder, writing("anew", []))
    assert (folder / "data").read_text() == "anew"


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "data").write_text("half")
        raise ConfigError("the corpus has no passages")

    with pytest.raises(ConfigError, match="no passages"):
        built_once(tmp_path / "index", build)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another --index-folder"):
        built_once(tmp_path / "file" / "index", writing("a", []))


def test_a_fingerprint_is_of_content_kind_and_order(tmp_path):
    names = ("a.jsonl", "b.jsonl", "c.jsonl.gz", "d.jsonl")
    one, same, packed, other = paths = [tmp_path / name for name in names]
    for path in paths:
        path.write_text("x")
    other.write_text("y")
    assert fingerprint([one], "1") == fingerprint([same], "1")
    different = [
        fingerprint([one], "1"),
        fingerprint([one], "2"),
        fingerprint([packed], "1"),
        fingerprint([other], "1"),
    ]
    different += [fingerprint([one, other], "1"), fingerprint([other, one], "1")]
    assert len(set(different)) == len(different)
