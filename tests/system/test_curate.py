"""`manege curate` with real probes: rollouts of the tiny model, killed in the middle, gone on with, selected."""

import json
import signal
import sys
import time

import pytest

from manege.curation.rows import read_rows
from tests.system.test_controller import UNSAFE
from tests.system.test_training import ROOT, RUN_FILE, descendants_of, finish, manege

sys.path.append(str(ROOT / "tests" / "tiny"))

from tiny_tasks import generate

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(UNSAFE.unsafe, reason="agents cannot be isolated on this machine"),
]

CURATION = f"""
name = "probed"
input = ["rows.jsonl"]
id = "id"
[[steps]]
kind = "probe"
run = "{RUN_FILE}"
rollouts = 4
[[steps]]
kind = "select"
unsolved = 3
"""


def write_rows(path, num, extra=0):
    """Tasks of the tiny model, as rows; `extra` more of them, which are no tasks that can be solved."""
    tasks = generate(split="train", num=num, seed=0)
    rows = [{"id": task.id, "input": task.input, "hidden": task.hidden} for task in tasks]
    wrong = [
        {"id": f"no{n}", "input": {"first": "a"}, "hidden": {"second": "b", "value": "never"}} for n in range(extra)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows + wrong))


def start(folder, *more):
    (folder / "curate.toml").write_text(CURATION)
    return manege("curate", folder / "curate.toml", "--folder", folder / "out", "--json", *more)


def curated(folder, *more):
    code, out, err = finish(start(folder, *more), 300)
    assert code == 0, err
    return json.loads(out)


def results(folder):
    """The file of what a probe saw."""
    (path,) = (folder / "out" / "probes").glob("*/results.jsonl")
    return path


def wait_for_results(process, folder, num):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if list((folder / "out").glob("probes/*/results.jsonl")) and results(folder).read_bytes().count(b"\n") >= num:
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(process.communicate())


def test_a_probe_that_was_killed_goes_on_and_what_can_be_learnt_from_is_kept(tmp_path):
    write_rows(tmp_path / "rows.jsonl", num=24, extra=8)
    process = start(tmp_path, 'steps.0.overrides=["controller.slots=4"]')
    wait_for_results(process, tmp_path, num=3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    known = results(tmp_path).read_bytes()
    whole = known[: known.rindex(b"\n") + 1]
    assert 3 <= whole.count(b"\n") < 32
    while descendants_of(tmp_path / "out"):
        time.sleep(0.05)

    report = curated(tmp_path, 'steps.0.overrides=["controller.slots=4"]')
    lines = results(tmp_path).read_bytes()
    assert lines.startswith(whole)  # what was known was not done again
    seen = {row["id"]: row for row in map(json.loads, lines.splitlines())}
    assert len(seen) == lines.count(b"\n") == 32
    assert all(row["rollouts"] == 4 and row["turns"] >= 4 and row["sampled_tokens"] > 0 for row in seen.values())
    mixed = {name for name, row in seen.items() if 0 < row["successes"] < 4}
    assert mixed
    assert not any(name.startswith("no") for name in mixed)
    probe, select = report["steps"]
    assert (probe["num_in"], probe["num_out"]) == (32, 32)
    assert select["kept"] == {"never solved": 3, "sometimes solved": len(mixed)}
    kept = {row["id"]: row for row in read_rows(tmp_path / "out" / "curated.jsonl")}
    assert mixed < set(kept)
    assert all(row["probe_successes"] == seen[name]["successes"] for name, row in kept.items())

    # Another row, and one that has changed under its id: only those are tried.
    write_rows(tmp_path / "rows.jsonl", num=24, extra=9)
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text.replace('"never"', '"nothing"', 1))
    report = curated(tmp_path, 'steps.0.overrides=["controller.slots=4"]')
    again = results(tmp_path).read_bytes()
    assert again.startswith(lines)
    assert {row["id"] for row in map(json.loads, again[len(lines) :].splitlines())} == {"no0", "no8"}
    assert report["steps"][0]["num_out"] == 33


def test_an_agent_that_cannot_run_ends_the_probe_with_its_reason(tmp_path):
    write_rows(tmp_path / "rows.jsonl", num=20)
    broken = "steps.0.overrides=[\"agent.setup=['sh', '-c', 'echo no disk; exit 3']\", \"controller.max_attempts=1\"]"
    code, _, err = finish(start(tmp_path, broken), 200)
    assert code == 2
    assert "no disk" in err


def test_rows_become_tasks_by_a_function_that_is_named(tmp_path):
    rows = [{"id": f"ab{n}", "start": "a", "answer": str(n)} for n in (11, 12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "making.py").write_text(
        "from manege.types import Task\n"
        "def task(row):\n"
        "    return Task(id=row['id'], input={'first': row['start']}, hidden={'second': 'b', 'value': row['answer']})\n"
    )
    code, _, err = finish(start(tmp_path), 300)
    assert code == 2
    assert "a row is no task" in err
    report = curated(tmp_path, "steps.0.task=making:task", "steps.0.rollouts=2", "steps.1.unsolved=9")
    assert report["steps"][0]["num_out"] == 2
