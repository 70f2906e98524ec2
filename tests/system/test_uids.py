"""A user of its own for each attempt: nobody else's, no other controller's either, and free when its holder dies."""

import subprocess
import sys

import pytest

from manege.errors import SandboxError
from manege.sandbox import uids

pytestmark = pytest.mark.skipif(not uids.available(), reason="only root, where it has all users, gives some away")

TWO = range(2_000_360_000, 2_000_360_002)
HOLD = f"""
from manege.sandbox import uids
with uids.lease({TWO}) as uid:
    print(uid, flush=True)
    input()
"""
LOOK = """
import os, sys
own, foreign = sys.argv[1:]
uid = int(own)
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
open(own + "/sub/file", "a").write("mine")
try:
    os.listdir(foreign)
except PermissionError:
    print("kept out")
"""


def test_an_id_is_held_against_other_controllers_until_its_holder_dies():
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=-1, stdout=-1, text=True) as other:
        theirs = int(other.stdout.readline())
        with uids.lease(TWO) as ours:
            assert {theirs, ours} == {*TWO}
            with pytest.raises(SandboxError, match="all 2 user ids"), uids.lease(TWO):
                pass
            other.kill()
            other.wait()
            with uids.lease(TWO) as third:
                assert third == theirs
    with uids.lease(range(ours, ours + 1)) as again:
        assert again == ours


def test_what_belongs_to_an_attempt_is_its_own_and_closed_to_another(tmp_path):
    outside = tmp_path / "outside"
    outside.touch()
    tmp_path.chmod(0o755)
    with uids.lease() as first, uids.lease() as second:
        folders = {}
        for uid in (first, second):
            folder = folders[uid] = tmp_path / str(uid)
            (folder / "sub").mkdir(parents=True)
            (folder / "sub" / "file").touch()
            (folder / "link").symlink_to(outside)
            folder.chmod(0o700)
            uids.own([str(folder)], uid)
        owners = {path.lstat().st_uid for path in [folders[first], *folders[first].rglob("*")]}
        groups = {path.lstat().st_gid for path in [folders[first], *folders[first].rglob("*")]}
        assert (owners, groups) == ({first}, {first})
        assert outside.stat().st_uid == 0
        look = [sys.executable, "-c", LOOK, str(first), str(second)]
        # By names from here: the folders above belong to root.
        assert subprocess.check_output(look, cwd=tmp_path, text=True) == "kept out\n"
