"""Tasks are made of a real package again and again the same, and what was made is not made again."""

import json
import shutil

import pytest

from manege.recipes.coding.build import build, take_shipped
from manege.recipes.coding.packages import select
from manege.recipes.coding.places import Places, default_folder
from manege.recipes.coding.tasks import load
from tests.system.coding_case import PACKAGE, prepared

pytestmark = pytest.mark.anyio


@pytest.fixture
def places(tmp_path):
    """A folder of its own, with what was prepared for all tests of this machine."""
    prepared()
    for name in ("sources", "environments"):
        (tmp_path / name).symlink_to(default_folder() / name)
    (tmp_path / "tools").symlink_to(default_folder() / "tools")
    (tmp_path / "tools.ready").touch()
    return Places(tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_the_same_seed_makes_the_same_tasks_byte_for_byte(places, capsys):
    rows = await build(places, [PACKAGE], 2, 0)
    first = places.tasks.read_bytes()
    assert [json.loads(line) for line in first.splitlines()] == rows
    assert len(rows) == 2
    assert "2 tasks of" in capsys.readouterr().out
    await build(places, [PACKAGE], 2, 0)
    assert "2 tasks of" not in capsys.readouterr().out
    # Half way there, it goes on where it was.
    made = json.loads(places.made(PACKAGE.name).read_text())
    places.made(PACKAGE.name).write_text(json.dumps({**made, "num_tried": 1, "bugs": made["bugs"][:1]}))
    await build(places, [PACKAGE], 2, 0)
    assert places.tasks.read_bytes() == first
    shutil.rmtree(places.folder / "made")
    await build(places, [PACKAGE], 2, 0)
    assert places.tasks.read_bytes() == first
    await build(places, [PACKAGE], 2, 1)
    assert places.tasks.read_bytes() != first


def test_shipped_tasks_are_ready_with_their_package(places):
    take_shipped(places, select([PACKAGE.name]))
    options = {"num": 100, "seed": 0, "folder": str(places.folder), "packages": [PACKAGE.name]}
    train, heldout = load(split="train", **options), load(split="heldout", **options, locate=True)
    assert len(train) + len(heldout) == len(places.tasks.read_text().splitlines()) >= 5
    assert not {task.id for task in train} & {task.id for task in heldout}
    for task in train:
        assert task.hidden["FAIL_TO_PASS"]
        assert task.hidden["files"].keys() == {"test_inflection.py"}
        assert "place" not in task.input
        assert not any(word in task.input["problem_statement"] for word in ("test_", "diff --git", "@@"))
