"""The scripts inside a Job, run by this machine's shell."""

import json
import subprocess

import pytest

from manege.controller.kubernetes.scripts import MESSAGE, agent_script, prepare_script, scorer_script


@pytest.fixture
def run(tmp_path):
    """Returns exit code and last message."""

    def run(script, *command):
        message = tmp_path / "message"
        script = script.replace(MESSAGE, str(message)).replace("/tmp/manege", str(tmp_path / "m"))
        done = subprocess.run(["sh", "-c", script, "sh", *command], timeout=60, check=False, stdout=subprocess.DEVNULL)
        return done.returncode, message.read_text() if message.exists() else None

    return run


@pytest.fixture
def workspace(tmp_path):
    folder = tmp_path / "workspace"
    (folder / "tests").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("exit 7", 7), ("kill -9 $$", 137), ("sleep 60", 137)])
def test_an_agents_end_is_told_and_never_fails_its_container(run, command, code):
    assert run(agent_script(1), "sh", "-c", command) == (0, json.dumps({"exit_code": code}))


def scoring(workspace, tmp_path, **changes):
    (tmp_path / "input.json").write_text("{}")
    (tmp_path / "hidden").write_text("hidden")
    settings = {"score_s": 1, "stdin": str(tmp_path / "input.json"), "has_channel": False}
    return scorer_script(str(workspace), **settings | changes)


@pytest.mark.parametrize(
    ("command", "channel", "end"),
    [
        ("echo no; echo 1; echo", False, (0, "1\n")),
        ("echo 1; exit 3", False, (3, "1\n")),
        ("cat", False, (0, "{}\n")),
        ("sleep 60", False, (137, "")),
        ("echo 0 >&3; echo 1", True, (0, "0\n")),
    ],
    ids=["last line", "failure", "stdin", "time", "channel"],
)
def test_a_scorers_last_line_is_its_message(run, workspace, tmp_path, command, channel, end):
    (tmp_path / "input.json").write_text("{}")
    code, message = run(scoring(workspace, tmp_path, has_channel=channel), "sh", "-c", command)
    assert (code, message.strip()) == (end[0], end[1].strip())


def test_hidden_files_never_go_through_what_an_agent_planted(run, workspace, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (workspace / "linked").symlink_to(outside)
    (workspace / "tests" / "file").symlink_to(outside / "file")
    (workspace / "blocked").write_text("a file where a folder shall be")
    files = {path: str(tmp_path / "hidden") for path in ("linked/deep/file", "tests/file", "blocked/file", "top")}
    run(scoring(workspace, tmp_path, files=files), "true")
    assert list(outside.iterdir()) == []
    for path in files:
        assert (workspace / path).read_text() == "hidden"
        assert not (workspace / path).is_symlink()


@pytest.mark.parametrize(
    ("glob", "path", "is_restored"),
    [
        ("tests/**", "tests/a.py", True),
        ("tests/**", "tests/deep/a.py", True),
        ("tests", "tests/deep/a.py", True),
        ("**/conftest.py", "conftest.py", True),
        ("**/conftest.py", "a/b/conftest.py", True),
        ("a/**/b.py", "a/b.py", True),
        ("conftest.py", "a/conftest.py", False),
        ("tests/**", "mytests/a.py", False),
    ],
)
def test_what_is_to_be_restored_is_as_it_was(run, workspace, tmp_path, glob, path, is_restored):
    pristine = tmp_path / "pristine"
    for folder, text in ((pristine, "was"), (workspace, "is")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    added = (workspace / path).with_name("added-" + (workspace / path).name)
    added.write_text("new")
    assert run(scoring(workspace, tmp_path, restore=[glob], pristine=str(pristine)), "true")[0] == 0
    assert (workspace / path).read_text() == ("was" if is_restored else "is")
    assert added.exists() == (not is_restored or "conftest" in glob or "b.py" in glob)


def test_a_workspace_comes_without_history(run, workspace, tmp_path):
    source = tmp_path / "image"
    (source / "sub" / ".git").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / "code").write_text("x")
    (source / "link").symlink_to("code")
    kept = tmp_path / "kept"
    kept.mkdir()
    assert run(prepare_script(str(workspace), source=str(source), pristine=str(kept)))[0] == 0
    for folder in (workspace, kept):
        assert (folder / "link").readlink().name == "code"
        assert not (folder / ".git").exists()
        assert not (folder / "sub" / ".git").exists()
