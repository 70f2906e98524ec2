"""`manege run --harness` and `manege harness`, as commands."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from manege.cli import main
from tests.conftest import TINY_MODEL

MAIN = "import sys; from manege.cli import main; sys.exit(main())"


def manege(*arguments, cwd):
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def model(tmp_path):
    """The tiny model, with room for what a harness says."""
    shutil.copytree(TINY_MODEL, tmp_path / "model")
    config = json.loads((TINY_MODEL / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return tmp_path / "model"


def test_a_harness_works_on_a_copy_of_a_folder_and_leaves_it_behind(tmp_path, model):
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    (project / "notes.txt").write_text("unchanged")
    code, out, err = manege(
        *("run", "--harness", "openai-agents", "--task", "Say something.", "--workspace", project, "--temperature", 1),
        *(f"model.path={model}", "sampling.max_new_tokens=8", "--unsafe"),
        cwd=tmp_path,
    )
    assert code == 0, err
    assert "user: Say something." in out
    assert "outcome ok" in out
    left = Path(out.partition("what it left: ")[2].strip())
    assert [path.name for path in left.iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in project.iterdir()) == [".git", "notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "name a run file, or a harness with --harness"),
        (["run", "--harness", "codex"], '--harness needs --task "what it is told"'),
        (["run", "--harness", "codxe", "--task", "t"], "there is no harness 'codxe'; did you mean 'codex'?"),
        (["run", "--harness", "codex", "--task", "t"], 'run "manege harness install codex"'),
        (["run", "--harness", "codex", "--task", "t", "--workspace", "nowhere"], "nowhere: no such folder"),
        (["run", "x.toml", "--workspace", "."], "--workspace needs --harness"),
        (["harness", "install"], "name what to install: all, or some of claude-code"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANEGE_HARNESSES", str(tmp_path / "none"))
    model = [f"model.path={TINY_MODEL}"] if "--task" in arguments else []
    assert main([*arguments, *model]) == 2
    assert message in capsys.readouterr().err


def test_the_list_says_what_is_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MANEGE_HARNESSES", str(tmp_path / "none"))
    assert main(["harness", "list"]) == 0
    assert "codex           0.171.0     not installed" in capsys.readouterr().out
