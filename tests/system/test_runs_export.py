"""`manege runs` and `manege export` on real runs, also while they go on; and exports in place of runs."""

import asyncio
import json
import os
import pty
import random
import signal
import time
from contextlib import suppress

import pytest

from manege.cli import main
from manege.cli.parts import FolderLock
from manege.cli.rebuild import complete_groups
from manege.cli.stored import StoredRun, reading
from manege.config import TrainConfig
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.store.exports.jsonl import read_jsonl
from manege.store.reading import StoreReader
from manege.store.sql import SqlStore
from manege.trainer.batch import build_batch
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from manege.types import Outcome
from tests.conftest import TINY_MODEL
from tests.system.test_show_replay import PAIR, STUDY, keep
from tests.system.test_training import RUN_FILE, finish, manege, rows, wait_for_steps

pytestmark = pytest.mark.timeout(240)
SETTINGS = ["train.groups=2", "train.group_size=4", "tasks.num_heldout=2", "credit.advantage=grpo"]
OPEN = [(None, None, [-0.5] * 3), PAIR[0]]


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """A verb in a folder of its own: exit code, what it prints, and what it says of errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def answer(command):
    def ask(*words):
        code, out, err = command(*words)
        assert code == 0, err
        return out

    return ask


@pytest.fixture
def data(answer):
    return lambda *words: json.loads(answer(*words, "--json"))


@pytest.fixture
def refusal(command):
    def ask(*words):
        code, _, err = command(*words)
        assert code == 2
        assert len(err.splitlines()) == 1, err
        return err

    return ask


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training that was stopped, with an export and a copy that were made while it went on."""
    base = tmp_path_factory.mktemp("runs")
    folder = base / "tiny"
    process = manege("train", RUN_FILE, f"folder={folder}", "train.steps=1000", *SETTINGS)
    wait_for_steps(process, folder, 2)
    early = {
        "export": ["export", folder, "--format", "jsonl", "--out", base / "early.jsonl"],
        "backup": ["runs", "backup", folder, base / "copy"],
        "list": ["runs", "list", folder, "--json"],
    }
    asked = {name: manege(*words) for name, words in early.items()}
    results = {name: finish(each, 60) for name, each in asked.items()}
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process, 60)[0] == 130
    return folder, results


@pytest.fixture
def exported(run, answer, tmp_path):
    def of(form):
        answer("export", run[0], "--format", form)
        return tmp_path / f"tiny.{form}"

    return of


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_export_is_shown_and_replayed_like_its_run(run, exported, answer, form):
    path = exported(form)
    replayed = answer("replay", run[0], "--set", "credit.weighting=token_mean")
    assert "whose rewards differ" in replayed
    assert answer("replay", path, "--set", "credit.weighting=token_mean") == replayed
    listed = answer("show", run[0], "--all")
    assert answer("show", path, "--all") == listed
    rollout_id = listed.splitlines()[1].split()[0]
    for words in ([], ["--json", "--tokens"]):
        assert answer("show", path, rollout_id, *words) == answer("show", run[0], rollout_id, *words)


def test_an_export_of_an_export_is_the_same_file(exported, answer, tmp_path):
    path = exported("parquet")
    answer("export", path, "--format", "jsonl", "--out", "again.jsonl")
    answer("export", exported("jsonl"), "--format", "jsonl", "--out", "twice.jsonl")
    assert len({(tmp_path / name).read_bytes() for name in ("tiny.jsonl", "again.jsonl", "twice.jsonl")}) == 1
    assert sorted(os.listdir(tmp_path)) == ["again.jsonl", "tiny.jsonl", "tiny.parquet", "twice.jsonl"]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_export_trains_like_its_run(run, exported, form):
    async def batch_of(place):
        async with reading(str(place)) as (reader, run_id):
            rollouts = (await reader.list_rollouts(run=run_id, limit=None)).rollouts
            rollouts = sorted(rollouts, key=lambda rollout: rollout.completion or 10**9)
            stored = StoredRun(
                id=run_id, source=reader, run=await reader.get_run(run_id), rollouts=rollouts, place=None
            )
            groups = [await stored.group(group, call_rewards=False) for group in complete_groups(rollouts) if group]
        config = stored.config()
        return config, build_batch(groups[:4], config.credit, success_reward=1.0, rng=random.Random(0))

    def trained(place):
        config, batch = asyncio.run(batch_of(place))
        folder = open_folder(str(TINY_MODEL))
        engine = TorchEngine(load_model(folder), folder, TrainConfig(learning_rate=1e-3))
        report = engine.step(batch.samples, objective_of(config.credit))
        return config, batch.metrics, report.metrics

    original = trained(run[0])
    assert original[2]["grad_norm"] > 0
    assert trained(exported(form)) == original


def test_a_running_run_is_exported_copied_and_listed(run, data, answer):
    folder, results = run
    assert {name: code for name, (code, *_) in results.items()} == {"export": 0, "backup": 0, "list": 0}
    [row] = json.loads(results["list"][1])
    assert row["place"] == str(folder)
    assert row["moved_s"] < 30
    assert row["success"]["step"] >= 1
    base = folder.parent
    before, copied = ({each["id"]: each for each in data("show", place, "--all")} for place in (folder, base / "copy"))
    ended = {name for name, each in copied.items() if each["outcome"]}
    assert len(ended) >= 2 * 2 * 4
    assert all(before[name] == copied[name] for name in ended)
    groups = [group for group in complete_groups(complete_rollouts(base / "copy")) if group is not None]
    assert len(groups) >= 2 * 2
    assert data("replay", base / "copy")["as run"] == data("replay", folder)["as run"][: len(groups) // 2]
    [row] = data("runs", "list", base / "copy")
    assert row["success"]["success_rate"] == pytest.approx(rows(base / "copy", "step")[-1]["success_rate"])
    assert len(answer("show", base / "early.jsonl", "--all").splitlines()) > 2 * 2 * 4


def test_good_rollouts_become_chat_examples(run, answer, tmp_path):
    folder, _ = run
    said = answer("export", folder, "--format", "sft")
    lines = [json.loads(line) for line in (tmp_path / "tiny.sft.jsonl").read_text().splitlines()]
    good = [each for each in complete_rollouts(folder) if each.spec.is_train and (each.reward or 0) >= 1]
    assert f"{len(lines)} samples of {len(good)} rollouts" in said
    assert len(lines) == len(good) > 0
    for example in lines:
        roles = [message["role"] for message in example["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert example["messages"][-1]["content"].startswith("ans")
    hidden = {str(value) for each in good for value in each.spec.task.hidden}
    assert not hidden & {key for example in lines for key in example}
    answer("export", folder, "--format", "sft", "--min-reward", "-9", "--out", "all.jsonl")
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) > len(lines)


def complete_rollouts(folder):
    async def read():
        reader = await StoreReader.open(folder / "manege.db")
        page = await reader.list_rollouts(limit=None)
        await reader.close()
        return page.rollouts

    return asyncio.run(read())


def test_filters_leave_out_the_others(tmp_path, answer):
    keep(tmp_path, {"a": PAIR, "b": OPEN}, config=STUDY)
    cases = {
        ("--state", "running"): ["study-b0"],
        ("--state", "succeeded", "--min-reward", "0.5"): ["study-a0", "study-b1"],
        (): ["study-a0", "study-a1", "study-b0", "study-b1"],
    }
    for words, wanted in cases.items():
        answer("export", tmp_path, "--format", "jsonl", *words)
        lines = [json.loads(line) for line in (tmp_path / "study.jsonl").read_text().splitlines()[1:]]
        assert [line["spec"]["id"] for line in lines] == wanted


def test_an_export_that_fails_leaves_the_file_as_it_was(tmp_path, answer, refusal):
    keep(tmp_path, {"a": PAIR}, config=STUDY)
    answer("export", tmp_path, "--format", "jsonl", "--out", "kept.jsonl")
    whole = (tmp_path / "kept.jsonl").read_bytes()
    (tmp_path / "damaged.jsonl").write_bytes(whole[:-20])
    assert "damaged.jsonl, line" in refusal("export", "damaged.jsonl", "--format", "jsonl", "--out", "kept.jsonl")
    assert (tmp_path / "kept.jsonl").read_bytes() == whole
    assert "cannot be written" in refusal("export", tmp_path, "--format", "jsonl", "--out", "none/kept.jsonl")
    assert not [name for name in os.listdir(tmp_path) if "partial" in name]


def beat(folder, gateway, state, *, ago_s=0.0):
    async def write():
        store = await SqlStore.open(folder / "manege.db", clock=lambda: time.time() - ago_s)
        await store.beat(gateway, state)
        await store.close()

    asyncio.run(write())


def test_the_list_says_what_waits_and_which_gateway_is_gone(tmp_path, answer, data):
    folder = tmp_path / "runs" / "study"
    folder.mkdir(parents=True)
    keep(folder, {"a": PAIR, "b": OPEN, "c": [(Outcome.AGENT_TIMEOUT, None, [])]}, config=STUDY)
    beat(folder, "here", {"oldest": {"call_in_flight": 30.0}, "progress_s": time.time() - 20})
    beat(folder, "lost", {"oldest": {"call_held": 99.0}, "progress_s": time.time() - 1}, ago_s=300)
    [row] = data("runs", "list")
    stats = row["stats"]
    assert (row["run"], row["place"]) == ("study", "runs/study")
    assert (stats["states"]["running"], stats["outcomes"]) == (1, {"ok": 3, "agent_timeout": 1})
    assert (stats["num_calls"], stats["sampled_tokens"]) == (4, 2 + 4 + 3 + 2)
    assert set(row["oldest_s"]) == {"running", "call_in_flight"}
    assert 30 <= row["oldest_s"]["call_in_flight"] < 50
    text = answer("runs", "list")
    assert all(len(line) <= 100 for line in text.splitlines()[:-1])
    assert "runs/study is open, oldest: call_in_flight 3" in text
    assert 20 <= row["moved_s"] < 40
    assert "last moved 2" in text
    assert "gateway lost gone for 5 min" in text
    assert "gateway here" not in text


def test_a_place_that_cannot_be_read_hides_no_other(tmp_path, command):
    for name in ("good", "bad"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    keep(tmp_path / "runs" / "good", {"a": PAIR}, config=STUDY)
    (tmp_path / "runs" / "bad" / "manege.db").write_text("nothing of ours, and long enough to be no database")
    code, out, err = command("runs", "list")
    assert code == 2
    assert "runs/good" in out
    assert err.startswith("runs/bad: ")
    code, out, err = command("runs", "prune", "--keep", "0", "--yes")
    assert code == 0
    assert out.startswith("runs/good: ")
    assert err.startswith("runs/bad stays: ")


def test_runs_are_compared_by_what_differs(tmp_path, answer, data):
    kept = {"fast": (0.1, [0.0, 0.3, 0.6, 0.9]), "slow": (0.2, [0.0, 0.0, 0.3, 0.6])}
    for name, (rate, successes) in kept.items():
        folder = tmp_path / name
        folder.mkdir()
        config = {"name": "study", "seed": 1, "folder": str(folder), "train": {"groups": 1, "learning_rate": rate}}
        keep(folder, {"a": PAIR}, config=config)
        (folder / "config.json").write_text(json.dumps({**config, "gateway": {}}))
        evaluations = [
            {"kind": "evaluation", "step": 0, "temperature": 1.0, "num_tasks": 9, "success_rate": 0.1},
            {"kind": "evaluation", "step": 4, "temperature": 1.0, "num_tasks": 9, "success_rate": successes[-1]},
        ]
        steps = [
            {"kind": "step", "step": number, "success_rate": success, "reward_mean": success, "train_s": 10.0 * number}
            | {"num_samples": 8, "samples_per_rollout": 2.0}
            for number, success in enumerate(successes, 1)
        ]
        lines = [json.dumps(row) + "\n" for row in [evaluations[0], *steps, evaluations[1]]]
        (folder / "metrics.jsonl").write_text("".join(lines))
    found = data("runs", "compare", "fast", "slow")
    assert found["config"] == {"train.learning_rate": [0.1, 0.2]}
    numbers = found["numbers"]
    assert numbers["steps"] == [4, 4]
    assert numbers["held-out success, T = 1, first"] == [0.1, 0.1]
    assert numbers["held-out success, T = 1, last"] == [0.9, 0.6]
    assert numbers["best success"] == pytest.approx([0.6, 0.3])
    assert numbers["train s to 30.0%"] == [30.0, 40.0]
    assert numbers["samples per rollout"] == [2.0, 2.0]
    text = answer("runs", "compare", "fast", "slow")
    assert "train.learning_rate" in text
    assert "seed" not in text
    # What has no metrics is still compared by its rollouts.
    answer("export", "slow", "--format", "jsonl")
    assert data("runs", "compare", "fast", "study.jsonl")["numbers"]["steps"] == [4, None]


@pytest.fixture
def three(tmp_path):
    """Runs of today and of some days ago, with other files in their folders."""
    folders = {}
    for name, days in (("older", 40), ("old", 35), ("new", 0)):
        folders[name] = folder = tmp_path / "runs" / name
        (folder / "rollouts" / "x").mkdir(parents=True)
        (folder / "rollouts" / "x" / "stdout.txt").write_text("said")
        (folder / "model").mkdir()
        (folder / "config.json").write_text(json.dumps({**STUDY, "gateway": {}}))
        talk = [(Outcome.OK, 1.0, [-0.5] * 20_000)] * 8
        keep(folder, {"a": talk}, config=STUDY, clock=lambda days=days: time.time() - days * 86400)
    return folders


def test_old_runs_go_and_new_ones_stay(three, answer, data, refusal):
    assert "nothing is deleted without --yes" in refusal("runs", "prune", "--older-than", "30d")
    assert "name the runs" in refusal("runs", "prune", "--yes")
    assert answer("runs", "prune", "--older-than", "50d", "--yes") == "nothing to delete\n"
    size = (three["older"] / "manege.db").stat().st_size
    assert answer("runs", "prune", "--keep", "2", "--yes").startswith("runs/older: 8 rollouts with 8 calls, ")
    assert (three["older"] / "manege.db").stat().st_size < size - 8 * 20_000
    assert sorted(os.listdir(three["older"])) == ["config.json", "lock", "manege.db", "manege.db.lock", "model"]
    answer("runs", "prune", "--older-than", "30d", "--all", "--yes")
    assert [row["place"] for row in data("runs", "list")] == ["runs/new"]
    assert not three["old"].exists()
    assert len(data("show", "runs/new")) == 8


def test_what_is_in_use_or_has_open_work_stays(three, tmp_path, answer, command, refusal):
    keep(three["old"], {"b": OPEN}, config=STUDY)
    with FolderLock(three["older"]):
        assert "is in use" in refusal("runs", "prune", "runs/older", "--all", "--yes")
        assert "1 of its rollouts have not ended" in refusal("runs", "prune", "runs/new", "runs/old", "--yes")
        code, out, err = command("runs", "prune", "--keep", "0", "--yes")
        assert code == 0
        assert {line.split(" ")[0] for line in err.splitlines()} == {"runs/older", "runs/old"}
        assert [line.split(":")[0] for line in out.splitlines()] == ["runs/new"]
    answer("runs", "prune", "runs/old", "--all", "--yes")
    assert sorted(os.listdir(tmp_path / "runs")) == ["new", "older"]


def test_one_of_several_runs_goes_alone(tmp_path, answer, data, refusal):
    keep(tmp_path, {"a": PAIR}, config=STUDY)
    keep(tmp_path, {"b": PAIR}, run="other")
    (tmp_path / "rollouts").mkdir()
    assert "--all is for a run folder that holds one run" in refusal("runs", "prune", tmp_path / "other", "--all")
    assert answer("runs", "prune", tmp_path / "other", "--yes") == f"{tmp_path}/other: 2 rollouts with 2 calls\n"
    assert [row["run"] for row in data("runs", "list", tmp_path)] == ["study"]
    assert (tmp_path / "rollouts").exists()


def at_a_terminal(typed, *words):
    """What is shown on a terminal at which somebody answers."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        process = manege(*words, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        terminal.write(typed)
        shown = b""
        # Linux says so when nobody has the other end open any more.
        with suppress(OSError):
            while part := terminal.read(4096):
                shown += part
    assert process.wait(30) == 0, shown
    return shown.decode()


def test_a_terminal_is_asked(three, answer, data):
    assert "delete this? [y/N]" in at_a_terminal(b"n\n", "runs", "prune", three["new"])
    assert len(json.loads(answer("show", "runs/new", "--json"))) == 8
    at_a_terminal(b"y\n", "runs", "prune", three["new"])
    assert data("runs", "list", "runs/new")[0]["stats"]["num_calls"] == 0


def test_a_copy_of_a_run_with_a_store_elsewhere_is_whole(tmp_path, answer, data, refusal):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "study"
    for each in (elsewhere, folder):
        each.mkdir()
    keep(elsewhere, {"a": PAIR}, config=STUDY)
    keep(elsewhere, {"b": PAIR}, run="other")
    config = {**STUDY, "gateway": {"store": str(elsewhere / "manege.db")}}
    (folder / "config.json").write_text(json.dumps(config))
    assert [row["id"] for row in data("show", folder)] == ["study-a1", "study-a0"]
    assert "runs: study, other;" in answer("runs", "backup", folder, "copy")
    (elsewhere / "manege.db").unlink()
    assert [row["id"] for row in data("show", "copy/study")] == ["study-a1", "study-a0"]
    assert "must be a new folder" in refusal("runs", "backup", "copy", "copy")


def test_a_database_server_takes_the_place_of_a_folder(tmp_path, postgres_url, answer, data, refusal):
    async def write():
        store = await SqlStore.open(postgres_url)
        for source in (tmp_path / "one.jsonl", tmp_path / "two.jsonl"):
            export = read_jsonl(source)
            await store.import_rollouts(export.run, list(export.rollouts))
        await store.close()

    keep(tmp_path, {"a": PAIR}, config=STUDY)
    keep(tmp_path, {"b": PAIR}, run="other", config={**STUDY, "name": "other"})
    for run, name in (("study", "one"), ("other", "two")):
        answer("export", tmp_path / run, "--format", "jsonl", "--out", f"{name}.jsonl")
    asyncio.run(write())
    server, _, query = postgres_url.partition("?")
    assert {row["run"] for row in data("runs", "list", postgres_url)} == {"study", "other"}
    assert f"{server}/study" in refusal("show", postgres_url)
    study = f"{server}/study?{query}"
    assert data("show", study) == data("show", tmp_path / "study")
    assert data("replay", study) == data("replay", tmp_path / "study")
    answer("export", study, "--format", "jsonl")
    assert (tmp_path / "study.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert "pg_restore" in answer("runs", "backup", postgres_url, "dump")
    assert (tmp_path / "dump" / "manege.dump").read_bytes().startswith(b"PGDMP")
    answer("runs", "prune", study, "--yes")
    assert [row["run"] for row in data("runs", "list", postgres_url)] == ["other"]
