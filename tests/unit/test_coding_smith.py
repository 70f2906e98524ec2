"""Rows in SWE-smith's columns as tasks, what runs in an image, and the Job of the shipped run file."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from manege.client import Claim
from manege.config import load_config
from manege.controller.kubernetes.manifest import build, check
from manege.controller.kubernetes.names import Owner
from manege.curation.rows import write_rows
from manege.errors import ConfigError
from manege.recipes.coding import patches
from manege.recipes.coding.in_image import set_up
from manege.recipes.coding.smith import from_row, load
from manege.types import Rollout, RolloutSpec, RolloutState

CODE = "def double(number):\n    return number * 2\n"
BUG = "def double(number):\n    return number * 3\n"
TEST = "from code_of import double\ndef test_double(): assert double(2) == 4\n"
CLUSTER = Path(str(files("manege.recipes.coding") / "cluster.toml"))


def row(number=0, *, repo="a__b.1234", **changes):
    return {
        "instance_id": f"{repo}.lm_rewrite__{number}",
        "repo": f"swesmith/{repo}",
        "patch": patches.make("code_of.py", CODE, BUG),
        "FAIL_TO_PASS": ["tests/test_code.py::test_double"],
        "PASS_TO_PASS": ["tests/test_more.py::test_more", "code_of.py::code_of.double"],
        "image_name": f"swesmith.x86_64.{repo}",
        "problem_statement": "double gives three times",
        "created_at": "2025-01-01",
    } | changes


def loaded(folder, rows, *, name="rows.jsonl", split="train", num=100, seed=0):
    write_rows(folder / name, rows)
    return load(split=split, num=num, seed=seed, file=str(folder / name))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.zst", "rows.parquet"])
def test_a_row_becomes_a_task_whose_tests_and_bug_are_hidden(tmp_path, name):
    (task,) = loaded(tmp_path, [row()], name=name)
    assert task.id == "a__b.1234.lm_rewrite__0"
    assert task.input == {
        "problem_statement": "double gives three times",
        "image_name": "swesmith.x86_64.a__b.1234",
    }
    assert task.hidden["FAIL_TO_PASS"] == ["tests/test_code.py::test_double"]
    # A test in the code itself could be edited by the agent.
    assert task.hidden["PASS_TO_PASS"] == ["tests/test_more.py::test_more"]


def test_a_fifth_of_the_owners_of_repositories_is_held_out_whatever_the_seed(tmp_path):
    rows = [row(number, repo=f"o{owner}__b.1") for owner in range(50) for number in range(3)]
    heldout = {task.id for task in loaded(tmp_path, rows, split="heldout", num=1000)}
    train = {task.id for task in loaded(tmp_path, rows, num=1000)}
    assert heldout | train == {each["instance_id"] for each in rows}
    assert not {name.partition("__")[0] for name in heldout} & {name.partition("__")[0] for name in train}
    assert 3 <= len({name.partition("__")[0] for name in heldout}) <= 17
    draws = [[task.id for task in loaded(tmp_path, rows, num=20, seed=seed)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    held = [[task.id for task in loaded(tmp_path, rows, split="heldout", num=5, seed=seed)] for seed in (1, 2)]
    assert held[0] == held[1]


def test_a_file_of_a_split_is_taken_as_it_says(tmp_path):
    for split in ("train", "heldout"):
        write_rows(tmp_path / f"{split}.jsonl", [row(split)])
        (task,) = load(split=split, num=9, seed=0, file=str(tmp_path / "{split}.jsonl"))
        assert task.id.endswith(split)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"problem_statement": " \n"}, id="no issue"),
        pytest.param({"problem_statement": None}, id="null for an issue"),
        pytest.param(
            {"FAIL_TO_PASS": ["test_double (code.Case)", "code_of.py::code_of.double"]}, id="not in files of tests"
        ),
        pytest.param({"patch": patches.make("lib/testing/x.py", CODE, BUG)}, id="the repair would be undone"),
    ],
)
def test_rows_that_nobody_can_solve_are_left_out_and_counted(tmp_path, caplog, changes):
    with caplog.at_level("INFO", logger="manege"):
        assert [task.id for task in loaded(tmp_path, [row(), row(1, **changes)])] == [row()["instance_id"]]
    assert "num_left=1 num_rows=2" in caplog.text


def test_a_row_without_a_column_is_named(tmp_path):
    without = {name: value for name, value in row().items() if name != "image_name"}
    with pytest.raises(ConfigError, match=r"lm_rewrite__0' has no image_name"):
        loaded(tmp_path, [without])


@pytest.fixture
def repository(tmp_path):
    """Of an image, in which the tests need a plugin of the repository's own configuration."""
    folder = tmp_path / "testbed"
    (folder / "tests").mkdir(parents=True)
    (folder / "code_of.py").write_text(CODE)
    (folder / "tests" / "test_code.py").write_text(TEST)
    (folder / "tests" / "test_more.py").write_text("def test_more(two): assert two == 2\n")
    (folder / "plugin_of.py").write_text("import pytest\n@pytest.fixture\ndef two(): return 2\n")
    (folder / "setup.cfg").write_text("[tool:pytest]\naddopts = -p plugin_of\n")
    return folder


def test_setup_puts_the_bug_in_and_the_tests_that_show_it_aside(repository, tmp_path):
    set_up(from_row(row()).hidden, repository, tmp_path / "aside")
    assert (repository / "code_of.py").read_text() == BUG
    assert [path.name for path in (repository / "tests").iterdir()] == ["test_more.py"]
    assert (tmp_path / "aside" / "tests" / "test_code.py").read_text() == TEST
    with pytest.raises(OSError, match=r"does not apply in the image's .*code_of\.py"):
        set_up(from_row(row()).hidden, repository, tmp_path / "aside")


@pytest.mark.parametrize(("code", "reward", "told"), [(CODE, 1.0, "1/1"), (BUG, 0.0, "0/1")], ids=["repaired", "not"])
def test_the_shipped_command_scores_without_manege(repository, tmp_path, code, reward, told):
    (repository / "code_of.py").write_text(code)
    task = from_row(row())
    (tmp_path / "task.json").write_text(json.dumps({"id": task.id, "input": task.input, "hidden": task.hidden}))
    reading, writing = os.pipe()
    command = [sys.executable, *load_config(CLUSTER).scorer.run[1:-1], str(writing)]
    variables = {"MANEGE_TASK_FILE": str(tmp_path / "task.json"), "MANEGE_WORKSPACE": str(repository)}
    variables["TMPDIR"] = str(tmp_path)
    with open(reading, "rb") as verdicts:
        subprocess.run(command, env=variables, cwd="/", pass_fds=(writing,), timeout=60, check=True)
        os.close(writing)
        verdict = json.loads(verdicts.read())
    assert verdict["reward"] == reward, verdict
    assert verdict["message"].startswith(f"FAIL_TO_PASS {told}, PASS_TO_PASS 1/1")


def test_the_job_of_the_shipped_run_file_hides_what_the_agent_must_not_see():
    config = load_config(CLUSTER)
    check(config)
    task = from_row(row())
    rollout = Rollout(
        spec=RolloutSpec(id="r", run="run", task=task), state=RolloutState.RUNNING, attempt=0, created_s=0
    )
    claim = Claim(rollout=rollout, agent_key="mk-0-a-r", scorer_key="ms-0-b-r")
    owner = Owner(gateway_url="http://10.0.0.5:8400", controller="kubernetes")
    made = build(claim, config, owner=owner, namespace="ns", gateway_url="http://10.0.0.5:8400")
    pod = made.job["spec"]["template"]["spec"]
    containers = {each["name"]: each for each in [*pod["initContainers"], *pod["containers"]]}
    assert list(containers) == ["prepare", "setup", "keep", "agent", "scorer"]
    assert {each["image"] for each in containers.values()} == {"swesmith.x86_64.a__b.1234"}
    mounts = {name: {m["name"]: m["mountPath"] for m in each["volumeMounts"]} for name, each in containers.items()}
    assert mounts["agent"] == {"workspace": "/testbed", "manege-task": "/manege/task"}
    assert mounts["setup"].items() >= {"workspace": "/testbed", "pristine": "/manege/pristine"}.items()
    assert mounts["scorer"].items() >= {"workspace": "/testbed", "manege-hidden": "/manege/hidden"}.items()
    assert containers["scorer"]["command"][-2:] == ["score", "3"]
    shown = json.dumps([containers["agent"], made.secret["stringData"]["task.json"]])
    assert "double gives three times" in shown
    assert "number * 3" not in shown
    assert "test_double" not in shown
    # Kubernetes takes a Secret of a MiB; the task is in it twice.
    assert len(json.dumps(made.secret)) < 100_000


def test_the_shipped_run_file_is_planned_beside_a_gateway(tmp_path):
    for split in ("train", "heldout"):
        write_rows(tmp_path / f"{split}.jsonl", [row(f"{split}{number}") for number in range(40)])
    command = [
        Path(sys.executable).with_name("manege"),
        "train",
        CLUSTER,
        "--dry-run",
        "--gpus",
        "4",
        "--gpu-memory",
        "139",
    ]
    command += ["--model-config", CLUSTER.with_name("qwen3.5-9b.json"), "--gateway", "http://10.0.0.5:8400"]
    options = f'tasks.options={{file="{tmp_path}/{{split}}.jsonl"}}'
    done = subprocess.run([*command, options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "gateway http://10.0.0.5:8400, with its engines" in done.stdout
