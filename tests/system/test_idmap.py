"""Root's prepared workspace, edited in place by an attempt's user who owns nothing of it."""

import subprocess
import sys

import pytest

from manege.sandbox import uids

pytestmark = pytest.mark.skipif(not uids.available(), reason="only root, where it has all users, gives some away")

EDIT = """
import os, sys
from manege.sandbox import idmap, uids
from manege.sandbox.syscalls import syscall

top, idmapped = sys.argv[1], sys.argv[2] == "idmapped"
with uids.lease() as uid:
    syscall("unshare", 0x00020000)
    syscall("mount", b"none", b"/", b"", 16384 | 1 << 18, b"")
    os.chdir(top)
    lower = top + "/lower"
    if idmapped:
        with idmap.user_namespace(uid) as namespace:
            idmap.mount_idmapped(lower, top + "/shown", namespace)
        lower = top + "/shown"
    uids.own([top + "/upper", top + "/work"], uid)
    options = f"lowerdir={lower},upperdir={top}/upper,workdir={top}/work,userxattr"
    syscall("mount", b"overlay", (top + "/place").encode(), b"overlay", 0, options.encode())
    os.chdir("place")
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with open("code/file", "r+") as file:
        file.write("NEW")
    os.unlink("code/other")
    os.rename("code/third", "third")
    open("code/added", "w").close()
    assert os.stat("code").st_uid == os.stat("code/file").st_uid == uid
    print(open("code/file").read(), *sorted(os.listdir("code")))
"""


@pytest.fixture
def edit(tmp_path):
    for name in ("lower/code", "upper", "work", "place", "shown"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("file", "other", "third"):
        (tmp_path / "lower" / "code" / name).write_text("old text")

    def run(how):
        return subprocess.run([sys.executable, "-c", EDIT, tmp_path, how], capture_output=True, text=True)

    return run


def test_the_attempts_user_edits_what_root_prepared_and_root_keeps_it(edit, tmp_path):
    edited = edit("idmapped")
    assert edited.stdout == "NEW text added file\n", edited.stderr
    lower = tmp_path / "lower" / "code"
    assert {path.name: path.read_text() for path in lower.iterdir()} == dict.fromkeys(
        ("file", "other", "third"), "old text"
    )
    assert {path.stat().st_uid for path in [lower, *lower.iterdir()]} == {0}
    assert (tmp_path / "upper" / "code" / "file").read_text() == "NEW text"


def test_without_an_idmapped_mount_it_may_not(edit):
    assert "PermissionError: [Errno 13] Permission denied: 'code/file'" in edit("plain").stderr
