"""`manege show --timeline` of a real training: its folder, an export of it, and through a gateway."""

import asyncio
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from manege.cli import main
from manege.store.sql import SqlStore
from manege.types import Outcome, RolloutSpec, Task
from tests.system.test_parts_alone import TINY, serving
from tests.system.test_show_replay import keep
from tests.system.test_training import RUN_FILE, finish, manege, rows
from tests.unit.test_timeline import boxes

pytestmark = pytest.mark.timeout(240)
STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timeline") / "tiny"
    overrides = [f"train.steps={STEPS}", "train.groups=2", "train.group_size=4", "tasks.num_heldout=2"]
    code, _, err = finish(manege("train", RUN_FILE, f"folder={folder}", "train.stop_success=1", *overrides))
    assert code == 0, err
    return folder


@pytest.fixture
def show(capsys):
    """What the verb prints, run in this process."""

    def ask(run, *words, code=0):
        capsys.readouterr()
        assert main(["show", str(run), *map(str, words)]) == code
        return capsys.readouterr()

    return ask


@pytest.fixture
def data(show):
    return lambda run, *words: json.loads(show(run, "--timeline", "--json", *words).out)


def spans_of(svg, name):
    """Left and right of each box of a path."""
    [group] = [each for each in ElementTree.parse(svg).getroot().iter() if each.get("id") == name]
    numbers = [float(number) for number in re.findall(r"[ML] (\S+)", group[0].get("d"))]
    return [(numbers[first], numbers[first + 2]) for first in range(0, len(numbers), 4)]


def test_bars_are_rollouts_colours_are_versions_and_bands_are_updates(run, data, show):
    timeline = data(run)
    known = {row["id"]: row for row in json.loads(show(run, "--all", "--json").out)}
    assert {bar["rollout"]: len(bar["pieces"]) for bar in timeline["bars"]} == {
        key: row["num_calls"] for key, row in known.items()
    }
    by_version = Counter(piece["version"] for bar in timeline["bars"] for piece in bar["pieces"])
    assert sorted(by_version) == list(range(STEPS + 1))
    steps = rows(run, "step")
    assert [(update["version"], update["end_s"]) for update in timeline["updates"]] == [
        (row["policy_version"], row["time_s"]) for row in steps
    ]
    # In sync training nothing runs while weights change.
    assert all(
        bar["end_s"] <= steps[-1]["time_s"] - steps[-1]["update_s"] for bar in timeline["bars"] if bar["is_train"]
    )

    assert show(run, "--timeline").out.startswith(f"{run / 'timeline.svg'}: {len(known)} rollouts")
    found = boxes(run / "timeline.svg")
    assert (found["rollouts"], found["updates"]) == (len(known), STEPS)
    assert {name: number for name, number in found.items() if name and name.startswith("version-")} == {
        f"version-{version}": number for version, number in by_version.items()
    }
    text = (run / "timeline.svg").read_text()
    colours = re.findall(r'<g id="version-\d+">\s*<path [^>]*fill: (#\w+)', text)
    assert len(set(colours)) == STEPS + 1
    assert all(f"<!-- v{version} -->" in text for version in range(1, STEPS + 1))


def test_what_is_drawn_lies_where_the_data_says(run, data, show, tmp_path):
    timeline, target = data(run), tmp_path / "timeline.svg"
    show(run, "--timeline", target)
    bars, bands = spans_of(target, "rollouts"), spans_of(target, "updates")
    (left, _), *_ = bars
    first, last = timeline["bars"][0], timeline["bars"][-1]
    per_second = (bars[-1][1] - left) / (last["end_s"] - first["start_s"])
    for each, (start, end) in zip([*timeline["bars"], *timeline["updates"]], [*bars, *bands], strict=True):
        assert (each["start_s"] - first["start_s"]) * per_second == pytest.approx(start - left, abs=0.01)
        assert (each["end_s"] - first["start_s"]) * per_second == pytest.approx(end - left, abs=0.01)


def test_an_export_and_a_gateway_show_the_same_bars_without_updates(run, data, show, tmp_path, monkeypatch):
    bars = data(run)["bars"]
    assert main(["export", str(run), "--format", "jsonl", "--out", str(tmp_path / "run.jsonl")]) == 0
    exported = data(tmp_path / "run.jsonl")
    assert (exported["bars"], exported["updates"]) == (bars, [])
    monkeypatch.chdir(tmp_path)
    assert "0 updates" in show("run.jsonl", "--timeline").out
    assert boxes(tmp_path / "timeline.svg")["rollouts"] == len(bars)
    words = ["gateway", "--model", TINY / "model", "--port", 0, "--folder", run]
    with serving(*words, ready=r"gateway (http://\S+),", log=tmp_path / "gateway.txt") as url:
        asked = data("tiny", "--gateway", url, "--key-file", run / "operator.key")
    assert sorted(asked["bars"], key=lambda bar: bar["rollout"]) == sorted(bars, key=lambda bar: bar["rollout"])


def test_a_png_is_drawn_where_its_name_says(run, show, tmp_path):
    show(run, "--timeline", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_any_name_is_drawn_also_without_config(tmp_path, show):
    name = 'a $b_{1$ <i> & "\x1b[31m 名'
    keep(tmp_path, {"g": [(Outcome.OK, 1.0, [-0.5]), (None, None, [])]}, run=name)
    show(tmp_path, "--timeline", tmp_path / "t.svg")
    assert boxes(tmp_path / "t.svg")["rollouts"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--timeline", "t.pdf"], "--timeline t.pdf: the name ends in .svg or .png"),
        (["--timeline", "/nowhere/t.svg"], "/nowhere/t.svg cannot be written"),
        (["r", "--timeline"], "--timeline is of a whole run"),
        (["--tokens", "--timeline"], "--timeline is of a whole run"),
    ],
)
def test_wrong_use_is_one_clear_line(run, show, words, message):
    err = show(run, *words, code=2).err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_run_that_has_not_started_has_no_timeline(tmp_path, show):
    async def write():
        store = await SqlStore.open(tmp_path / "manege.db")
        await store.create_rollouts([RolloutSpec(id="r", run="new", task=Task(id="t", input={}))])
        await store.close()

    asyncio.run(write())
    assert "run new: no rollout has started yet" in show(tmp_path, "--timeline", code=2).err
