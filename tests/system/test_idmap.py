"""Root's prepared workspace, edited in place by an attempt's user who owns nothing of it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from manege.sandbox import uids
from manege.sandbox.launcher import search_path
from manege.sandbox.policy import Policy
from manege.sandbox.probe import probe
from manege.sandbox.spec import Limits, Overlay, ProcessSpec

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        not (uids.available() and probe().namespaces and probe().overlay),
        reason="needs root, where it has all users, with namespaces and overlays",
    ),
]

FILES = ("edited", "removed", "moved")
EDIT = """
set -e
printf NEW | dd of=code/edited conv=notrunc status=none
rm code/removed
mv code/moved moved
touch code/added
stat -c %u code code/edited code/added
cat code/edited
"""


async def test_the_attempts_user_edits_what_root_prepared_and_root_keeps_it(launcher, tmp_path):
    for name in ("lower/code", "upper", "work", "place", "scratch"):
        (tmp_path / name).mkdir(parents=True)
    lower, upper = tmp_path / "lower" / "code", tmp_path / "upper"
    for name in FILES:
        (lower / name).write_text("old text")
    with uids.lease() as uid:
        uids.own([str(tmp_path / name) for name in ("upper", "work", "scratch")], uid)
        policy = Policy(
            layers=replace(probe(), notify=False),
            writable=[str(tmp_path / "place"), str(tmp_path / "scratch")],
            readable=[],
            private=[],
            tcp_ports=[],
            protected_pids=[os.getpid()],
            uid=uid,
        )
        shown = Overlay(
            place=str(tmp_path / "place"),
            lower=[str(tmp_path / "lower")],
            upper=str(upper),
            work=str(tmp_path / "work"),
        )
        ended = await launcher.run(
            ProcessSpec(
                program=["sh", "-c", EDIT],
                role="agent",
                env={"PATH": search_path(), "TMPDIR": str(tmp_path / "scratch")},
                cwd=str(tmp_path / "place"),
                stdout=str(tmp_path / "stdout"),
                stderr=str(tmp_path / "stderr"),
                limits=Limits(),
                policy=policy,
                overlay=shown,
            ),
            60,
        )
    assert ended.code == 0, (tmp_path / "stderr").read_text()
    inside = (tmp_path / "stdout").read_text().split("\n", 3)
    assert inside == ["1000", "1000", "1000", "NEW text"]
    assert {path.name: path.read_text() for path in lower.iterdir()} == dict.fromkeys(FILES, "old text")
    assert {path.stat().st_uid for path in [lower, *lower.iterdir()]} == {0}
    assert (upper / "code" / "edited").read_text() == "NEW text"
    assert {path.lstat().st_uid for path in (upper / "code" / "added", upper / "moved")} == {uid}
    assert sorted(path.name for path in Path(tmp_path / "place").iterdir()) == []
