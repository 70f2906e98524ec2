"""A curation as a whole: the published counts on a table of the same shape, and what is done again and what is not."""

import json
import subprocess
import sys

import pytest

from manege.curation.config import load_curation
from manege.curation.pipeline import curate
from manege.curation.report import write_report
from manege.curation.rows import read_rows
from manege.errors import ConfigError
from tests import curation_tables as tables
from tests.system.test_training import finish, manege

pytestmark = pytest.mark.anyio

STEPS = """
name = "small"
input = ["rows.jsonl"]
id = "id"
[[steps]]
kind = "not_empty"
column = "text"
[[steps]]
kind = "has_ref"
refs = "refs.txt"
[[steps]]
kind = "probe"
results = "probes.jsonl"
[[steps]]
kind = "select"
unsolved = 1
"""


async def nobody(step, rows, results):
    """Where agents would try tasks."""
    raise AssertionError("results are in a file")


def small(folder, num_rows=30):
    rows = [{"id": str(number), "text": "" if number % 3 == 0 else "x"} for number in range(num_rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "refs.txt").write_text("\n".join(str(number) for number in range(num_rows) if number != 4))
    seen = [{"id": str(number), "rollouts": 4, "successes": number % 5} for number in range(num_rows)]
    (folder / "probes.jsonl").write_text("".join(json.dumps(each) + "\n" for each in seen))
    (folder / "c.toml").write_text(STEPS)


async def run(folder, *overrides):
    """Which steps were done now, and the report."""
    config, new = load_curation(folder / "c.toml", overrides), []

    def on_step(step, is_new):
        new.extend([step.kind] * is_new)

    report = await curate(config, base=folder, folder=folder / "out", probe=nobody, on_step=on_step)
    return new, report


async def test_finished_steps_are_skipped_and_a_change_is_done_from_there_on(tmp_path):
    small(tmp_path)
    kinds = ["not_empty", "has_ref", "probe", "select"]
    new, report = await run(tmp_path)
    assert new == kinds
    assert [(step.num_in, step.num_out) for step in report.steps] == [(30, 20), (20, 19), (19, 19), (19, 13)]
    first = (tmp_path / "out" / "curated.jsonl").read_bytes()

    new, again = await run(tmp_path)
    assert new == []
    assert again == report
    assert (await run(tmp_path, "steps.3.unsolved=2"))[0] == ["select"]
    assert (await run(tmp_path))[0] == ["select"]
    assert (tmp_path / "out" / "curated.jsonl").read_bytes() == first
    for name, line, changed in [
        ("probes.jsonl", '{"id": "1", "rollouts": 4, "successes": 4}\n', kinds[2:]),
        ("refs.txt", "\n4\n", kinds[1:]),
        ("rows.jsonl", '{"id": "30", "text": "x"}\n', kinds),
    ]:
        with (tmp_path / name).open("a") as file:
            file.write(line)
        assert (await run(tmp_path))[0] == changed
    assert (await run(tmp_path, "seed=1"))[0] == kinds
    left = {row["id"] for row in read_rows(tmp_path / "out" / "curated.jsonl")}
    assert "2" in left
    assert "1" not in left  # it is always solved by now


async def test_a_step_that_was_cut_off_is_done_again(tmp_path):
    small(tmp_path)
    await run(tmp_path)
    whole = (tmp_path / "out" / "curated.jsonl").read_bytes()
    (tmp_path / "out" / "02-has_ref" / "step.json").unlink()
    (tmp_path / "out" / "02-has_ref" / "rows.jsonl.zst").write_bytes(b"half")
    (tmp_path / "out" / "curated.jsonl").unlink()
    new, _ = await run(tmp_path)
    assert new == ["has_ref"]
    assert (tmp_path / "out" / "curated.jsonl").read_bytes() == whole


async def test_ids_that_come_twice_are_refused(tmp_path):
    small(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"id": "1", "text": "x"}\n' * 2)
    with pytest.raises(ConfigError, match="id = '1' comes twice"):
        await run(tmp_path)


async def test_dropped_rows_are_named_with_their_reasons(tmp_path):
    small(tmp_path, num_rows=6)
    await run(tmp_path)
    assert list(read_rows(tmp_path / "out" / "02-has_ref" / "dropped.jsonl")) == [
        {"id": "4", "reason": "no such branch or tag"}
    ]


async def test_reports_say_it_in_words_numbers_and_a_picture(tmp_path):
    small(tmp_path)
    _, report = await run(tmp_path)
    assert write_report(report, tmp_path) is None
    page = (tmp_path / "report.md").read_text()
    assert "| 1. not_empty: has a statement | 30 | 10 text is empty | 20 |" in page
    assert "| curated.jsonl | 13 |" in page
    assert json.loads((tmp_path / "report.json").read_text())["steps"][3]["kept"] == {
        "never solved": 1,
        "sometimes solved": 12,
    }
    assert "<svg" in (tmp_path / "funnel.svg").read_text()
    assert (tmp_path / "funnel.png").read_bytes().startswith(b"\x89PNG")


def published(folder, *more):
    """The table of the published size through the command line; returns the report."""
    (folder / "curate.toml").write_text(tables.CURATION)
    process = manege("curate", folder / "curate.toml", "--folder", folder / "out", "--json", *more)
    code, out, err = finish(process, 600)
    assert code == 0, err
    return json.loads(out)


def check_published(folder, report):
    dropped = [step["dropped"] for step in report["steps"]]
    assert report["steps"][0]["num_in"] == 59_136
    assert dropped == [
        {"problem_statement is empty": 18_033},
        {"no such branch or tag": 1_265},
        {"more than 200 tests": tables.MANY},
        {"repository of the evaluation": tables.EVALUATED},
        {},
        {"never solved, not drawn": tables.NEVER - 1000, "always solved": tables.ALWAYS},
        {},
    ]
    assert report["steps"][5]["kept"] == {"sometimes solved": tables.MIXED, "never solved": 1000}
    assert sum(output["num_rows"] for output in report["outputs"]) == tables.MIXED + 1000


@pytest.mark.timeout(300)
def test_the_published_counts_come_out_of_a_table_of_59136_rows(tmp_path):
    tables.write_table(tmp_path)
    report = published(tmp_path)
    check_published(tmp_path, report)
    train, heldout = (list(read_rows(tmp_path / "out" / f"{side}.jsonl")) for side in ("train", "heldout"))
    assert len(train) == report["outputs"][0]["num_rows"]
    assert abs(len(heldout) / (len(train) + len(heldout)) - 0.1) < 0.01
    owners = [{tables.owner(row) for row in rows} for rows in (train, heldout)]
    assert not owners[0] & owners[1]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_table_larger_than_its_memory_is_curated(tmp_path):
    tables.write_table(tmp_path, patch_chars=12_000)
    (tmp_path / "curate.toml").write_text(tables.CURATION)
    program = (
        "import resource, sys; from manege.cli import main; code = main();"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr); sys.exit(code)"
    )
    words = ["curate", tmp_path / "curate.toml", "--folder", tmp_path / "out", "--json", "format=parquet"]
    done = subprocess.run([sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True, check=True)
    check_published(tmp_path, json.loads(done.stdout))
    size_mb = (tmp_path / "rows.jsonl").stat().st_size / 2**20
    assert size_mb > 700
    assert int(done.stderr.split()[-1]) < size_mb / 2
    assert sum(1 for _ in read_rows(tmp_path / "out" / "train.parquet"))
