"""Workspaces that are prepared once: from folders, archives and Git commits, for agents that each see their own."""

import asyncio
import contextlib
import dataclasses
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import zstandard

from manege.cli.arguments import read_run
from manege.config import WorkspaceConfig
from manege.controller.folders import make_folders
from manege.controller.workspaces.cache import Workspaces
from manege.controller.workspaces.layers import finished
from manege.errors import HarnessError
from manege.sandbox.policy import Policy
from manege.sandbox.probe import probe
from manege.sandbox.spec import Limits, ProcessSpec
from manege.types import Outcome, Rollout, RolloutSpec, RolloutState, Task
from tests.ordinary_user import run_as_nobody
from tests.system.test_controller import controlling, run_config, settle, spec

pytestmark = pytest.mark.anyio

FILES = {"README": "hello\n", "src/main.py": "print(1)\n", "tests/data/deep.txt": "x" * 5000, "bin/tool": "#!/bin/sh\n"}


def write(folder, files=FILES):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def template(tmp_path):
    folder = write(tmp_path / "template")
    (folder / "bin/tool").chmod(0o755)
    (folder / "link").symlink_to("src/main.py")
    (folder / "empty").mkdir()
    write(folder, {".git/HEAD": "ref", "vendor/lib/.git/config": "x", "vendor/lib/code.c": "int x;"})
    return folder


KEPT = {
    **FILES,
    "link": "-> src/main.py",
    "vendor/lib/code.c": "int x;",
    **dict.fromkeys(["bin", "empty", "src", "tests", "tests/data", "vendor", "vendor/lib"], "/"),
}


def tree(folder):
    """Everything below a folder."""

    def shown(path):
        if path.is_symlink():
            return f"-> {path.readlink()}"
        return "/" if path.is_dir() else path.read_text()

    return {str(path.relative_to(folder)): shown(path) for path in sorted(Path(folder).rglob("*"))}


@pytest.fixture
def workspaces(tmp_path, launcher):
    return Workspaces(tmp_path / "prepared", launcher)


def prepare(workspaces, source, *, timeout_s=60, task=None, **config):
    config = WorkspaceConfig(source=str(source), **config)
    return workspaces.prepare(config, Task(id="t", input=task or {}), timeout_s=timeout_s)


async def prepared(workspaces, source, **config):
    """What a preparation of a source shows."""
    async with prepare(workspaces, source, **config) as made:
        return tree(made.folder)


def attempt(tmp_path, name="r"):
    spec = RolloutSpec(id=name, run="run", task=Task(id="t", input={}))
    return make_folders(tmp_path / "run", Rollout(spec=spec, state=RolloutState.RUNNING, attempt=0, created_s=0))


async def test_a_folder_is_taken_as_it_is_but_for_its_history(workspaces, template):
    async with prepare(workspaces, template) as made:
        assert tree(made.folder) == KEPT
        assert os.access(made.folder / "bin/tool", os.X_OK)
        assert not os.access(made.folder / "README", os.X_OK)


async def test_equal_contents_are_prepared_once_and_changed_ones_anew(workspaces, template, tmp_path):
    runs = tmp_path / "runs"
    setup = [["sh", "-c", f"echo run >> {runs}; echo built > built"]]
    async with contextlib.AsyncExitStack() as stack:
        many = [await stack.enter_async_context(prepare(workspaces, template, setup=setup)) for _ in range(3)]
    twins = subprocess.run(["cp", "-r", template, tmp_path / "twin"], check=True) and tmp_path / "twin"
    async with prepare(workspaces, twins, setup=setup) as twin:
        assert {one.digest for one in many} == {twin.digest}
    assert runs.read_text() == "run\n"
    (template / "src/main.py").write_text("print(2)\n")
    assert (await prepared(workspaces, template, setup=setup))["src/main.py"] == "print(2)\n"
    assert runs.read_text() == "run\n" * 2
    assert await prepared(workspaces, template, setup=[["rm", "README"]]) == {
        name: "print(2)\n" if name == "src/main.py" else text for name, text in KEPT.items() if name != "README"
    }
    assert (template / "README").exists()


async def test_all_who_want_the_same_at_once_wait_for_one_preparation(workspaces, template, tmp_path):
    runs = tmp_path / "runs"
    setup = [["sh", "-c", f"echo run >> {runs}"]]
    found = await asyncio.gather(*[prepared(workspaces, template, setup=setup) for _ in range(20)])
    assert all(each == KEPT for each in found)
    assert runs.read_text() == "run\n"


async def test_two_controllers_may_share_the_folder(launcher, template, tmp_path):
    both = [Workspaces(tmp_path / "prepared", launcher) for _ in range(2)]
    found = await asyncio.gather(*[prepared(each, template) for each in both])
    assert found == [KEPT, KEPT]
    assert len(list((tmp_path / "prepared").iterdir())) == 1


async def test_setup_that_fails_says_why_is_not_kept_and_is_tried_again(workspaces, template, tmp_path):
    setup = [["sh", "-c", f"echo no such package >&2; test -e {tmp_path / 'mended'}"]]
    for _ in range(2):
        with pytest.raises(HarnessError, match=r"exit code 1: no such package$"):
            await prepared(workspaces, template, setup=setup)
    assert list((tmp_path / "prepared").iterdir()) == []
    (tmp_path / "mended").touch()
    assert await prepared(workspaces, template, setup=setup) == KEPT


async def test_setup_ends_with_its_time_and_with_those_who_wait_for_it(workspaces, template, tmp_path):
    hang = [["sh", "-c", f"echo $$ > {tmp_path / 'pid'}; sleep 600"]]
    with pytest.raises(HarnessError, match=r"was not prepared within 2 s|did not end within 2 s"):
        await prepared(workspaces, template, setup=hang, timeout_s=2)
    waiting = [asyncio.create_task(prepared(workspaces, template, setup=[*hang, ["true"]])) for _ in range(2)]
    (tmp_path / "pid").unlink()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.01)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)  # the other one still waits
    waiting[1].cancel()
    await asyncio.wait(waiting)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list((tmp_path / "prepared").iterdir()) == []


def archive(path, template):
    """The template without most of its history, as an archive of the kind that its name says."""
    names = [name for name in tree(template) if ".git" not in Path(name).parts] + [".git/HEAD"]
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as made:
            for name in names:
                if (template / name).is_symlink():
                    info = zipfile.ZipInfo(name)
                    info.external_attr = 0o120777 << 16
                    made.writestr(info, os.readlink(template / name))
                else:
                    made.write(template / name, name)
        return path
    kind = "" if path.suffix in (".tar", ".zst") else path.suffix[1:]
    with tarfile.open(path, f"w:{kind}") as made:
        for name in names:
            made.add(template / name, name, recursive=False)
    if path.suffix == ".zst":
        path.write_bytes(zstandard.compress(path.read_bytes()))
    return path


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.xz", "a.tar.bz2", "a.tar.zst", "a.zip"])
async def test_an_archive_holds_what_was_packed(workspaces, template, tmp_path, name):
    packed = archive(tmp_path / name, template)
    async with prepare(workspaces, packed) as made:
        assert tree(made.folder) == KEPT
        assert os.access(made.folder / "bin/tool", os.X_OK)


def entry(name, **changes):
    made = tarfile.TarInfo(name)
    for key, value in changes.items():
        setattr(made, key, value)
    return made


ESCAPES = {
    "parent": [entry("../evil", size=1)],
    "parent inside": [entry("a/../../evil", size=1)],
    "absolute": [entry("/tmp/evil", size=1)],
    "link to the outside": [entry("l", type=tarfile.SYMTYPE, linkname="../../outside")],
    "absolute link": [entry("l", type=tarfile.SYMTYPE, linkname="/etc")],
    "hard link": [entry("l", type=tarfile.LNKTYPE, linkname="../../outside/secret")],
    "hard link to a link": [
        entry("s", type=tarfile.SYMTYPE, linkname="a"),
        entry("l", type=tarfile.LNKTYPE, linkname="s"),
    ],
    "links that lead out together": [
        entry("d", type=tarfile.DIRTYPE),
        entry("d/up", type=tarfile.SYMTYPE, linkname=".."),
        entry("out", type=tarfile.SYMTYPE, linkname="d/up/.."),
    ],
    "device": [entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "pipe": [entry("pipe", type=tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("entries", ESCAPES.values(), ids=ESCAPES)
async def test_an_archive_that_would_reach_out_is_refused(workspaces, tmp_path, entries):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        for each in entries:
            tar.addfile(each, io.BytesIO(b"x") if each.size else None)
    before = tree(tmp_path)
    with pytest.raises(HarnessError, match=r"evil\.tar|hard link"):
        await prepared(workspaces, tmp_path / "evil.tar")
    assert {**tree(tmp_path), "prepared": "/"} == before | {"prepared": "/"}
    assert not Path("/tmp/evil").exists()


async def test_a_file_is_never_written_through_a_link_of_the_archive(workspaces, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        tar.addfile(entry("l", type=tarfile.SYMTYPE, linkname="d"))
        tar.addfile(entry("d", type=tarfile.DIRTYPE))
        tar.addfile(entry("l/file", size=1), io.BytesIO(b"x"))
    with pytest.raises(HarnessError):
        await prepared(workspaces, tmp_path / "evil.tar")
    zipped = tmp_path / "evil.zip"
    with zipfile.ZipFile(zipped, "w") as made:
        info = zipfile.ZipInfo("l")
        info.external_attr = 0o120777 << 16
        made.writestr(info, "../../outside")
        made.writestr("l/file", "x")
    with pytest.raises(HarnessError):
        await prepared(workspaces, zipped)
    assert list(outside.iterdir()) == []


async def test_a_source_that_is_nothing_of_that_kind_is_named(workspaces, tmp_path):
    (tmp_path / "noise").write_bytes(os.urandom(4096))
    for source, message in [(tmp_path / "none", r"none' does not exist"), (tmp_path / "noise", r"cannot be unpacked")]:
        with pytest.raises(HarnessError, match=message):
            await prepared(workspaces, source)
    with pytest.raises(HarnessError, match=r"the task's input has no field 'repo'"):
        await prepared(workspaces, "{repo}")
    with pytest.raises(HarnessError, match=r"source = 'some/folder' must be an absolute path"):
        await prepared(workspaces, "{repo}", task={"repo": "some/folder"})
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "pipe")
    with pytest.raises(HarnessError, match=r"folder/pipe is no file, folder or link"):
        await prepared(workspaces, tmp_path / "folder")


def git(repository, *words):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(["git", "-C", repository, *identity, *words], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    write(
        folder,
        {"code.py": "old\n", "run.sh": "#!/bin/sh\n", "docs/gone.txt": "x", ".gitattributes": "docs export-ignore"},
    )
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("code.py")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    git(folder, "tag", "v1")
    (folder / "code.py").write_text("the solution\n")
    git(folder, "commit", "-qam", "second")
    return folder


@pytest.mark.parametrize("place", ["{folder}", "file://{folder}"], ids=["path", "URL"])
@pytest.mark.parametrize("by", ["id", "tag", "branch"])
async def test_a_commit_is_its_files_and_nothing_of_its_history(workspaces, repository, tmp_path, place, by):
    first = git(repository, "rev-parse", "v1")
    (repository / "code.py").write_text("not committed\n")
    commit, code = {"id": (first, "old\n"), "tag": ("v1", "old\n"), "branch": ("main", "the solution\n")}[by]
    source = place.format(folder=repository)
    async with prepare(workspaces, "{repo}", commit="{base}", task={"repo": source, "base": commit}) as made:
        assert tree(made.folder) == {
            "code.py": code,
            "docs": "/",
            "docs/gone.txt": "x",
            ".gitattributes": "docs export-ignore",
            "link": "-> code.py",
            "run.sh": "#!/bin/sh\n",
        }
        assert os.access(made.folder / "run.sh", os.X_OK)
    assert [path.name for path in (tmp_path / "prepared" / made.digest).iterdir() if path.name != "size"] == [
        "workspace"
    ]
    assert git(repository, "status", "--porcelain") == "M code.py"


async def test_a_branch_that_moves_is_what_it_was_when_it_was_first_asked_for(workspaces, repository):
    before = await prepared(workspaces, repository, commit="main")
    git(repository, "reset", "-q", "--hard", "v1")
    assert await prepared(workspaces, repository, commit="main") == before


@pytest.mark.parametrize(
    ("source", "commit"),
    [
        *[("{folder}", name) for name in ("no-such", "--help")],
        *[("file://{folder}", name) for name in ("no-such", "--upload-pack=x", "0" * 40)],
        *[(place, "v1") for place in ("{folder}/docs", "{folder}/none", "file://{folder}/none")],
    ],
)
async def test_a_commit_that_is_not_there_is_named(workspaces, repository, source, commit):
    with pytest.raises(HarnessError, match=r"agent\.workspace|git"):
        await prepared(workspaces, source.format(folder=repository), commit=commit)


async def test_what_nobody_uses_goes_when_there_is_no_room_for_it_the_oldest_first(launcher, template, tmp_path):
    folder = tmp_path / "prepared"
    workspaces = Workspaces(folder, launcher, kept_bytes=300 << 10)
    digests = []

    async def make(number):
        write(template, {"big": str(number) * (100 << 10)})
        async with prepare(workspaces, template) as made:
            digests.append(made.digest)

    write(template, {"big": "used" * (25 << 10)})
    async with prepare(workspaces, template) as used:
        before = tree(used.folder)
        for number in range(4):
            await make(number)
        kept = {path.name for path in folder.iterdir()}
        assert digests[3] in kept
        assert not kept & set(digests[:2])
        assert (tree(used.folder), used.digest in kept) == (before, True)
    await make(5)
    assert used.digest not in {path.name for path in folder.iterdir()}


async def test_what_a_killed_controller_left_half_is_removed_and_never_used(workspaces, template, tmp_path):
    write(tmp_path / "prepared" / "making-left" / "workspace", {"half": "x"})
    (tmp_path / "prepared" / "making-left" / "workspace").chmod(0)
    assert await prepared(workspaces, template) == KEPT
    assert [path.name for path in (tmp_path / "prepared").iterdir() if path.name == "making-left"] == []


async def test_without_overlays_an_attempt_gets_a_copy_of_its_own(workspaces, template, tmp_path):

    machine = dataclasses.replace(probe(), overlay=False)
    folders = attempt(tmp_path)
    async with prepare(workspaces, template) as made:
        assert await workspaces.place(made, folders, machine, timeout_s=60) is None
        assert tree(folders.workspace) == KEPT
        (folders.workspace / "README").write_text("changed")
        (folders.workspace / "src/main.py").unlink()
        assert tree(made.folder) == KEPT


@pytest.fixture
def machine():
    """Layers with overlays, in namespaces."""
    found = probe()
    if not found.overlay:
        pytest.skip("this machine allows no overlay mounts")
    return found


WORK = """
test "$(cat README)" = hello && test ! -e .git && echo "$NAME" > README && echo "$NAME" > "new $NAME"
rm tests/data/deep.txt && mv src moved && ln -s moved again && chmod 000 bin/tool
rm -r vendor && mkdir vendor && echo "$NAME" > vendor/own && mkfifo pipe
ls > "$HOME/seen"; touch "$HOME/ready"
until test -e "$HOME/go"; do sleep 0.05; done
test "$(cat README vendor/own)" = "$NAME
$NAME" && ls | cmp - "$HOME/seen"
"""


def changed(name):
    """What an agent leaves of KEPT."""
    left = {path: text for path, text in KEPT.items() if not path.startswith(("src", "vendor", "tests/data/deep"))}
    added = {"moved": "/", "moved/main.py": "print(1)\n", "again": "-> moved", "vendor": "/", "vendor/own": f"{name}\n"}
    return left | added | {"README": f"{name}\n", f"new {name}": f"{name}\n"}


def agent(folders, overlay, machine, name):
    private = [folders.workspace, folders.home, folders.scratch]
    return ProcessSpec(
        program=["sh", "-ec", WORK],
        role="agent",
        env={"PATH": "/usr/bin:/bin", "HOME": str(folders.home), "TMPDIR": str(folders.scratch), "NAME": name},
        cwd=str(folders.workspace),
        stdout=str(folders.logs / "stdout.txt"),
        stderr=str(folders.logs / "stderr.txt"),
        limits=Limits(),
        policy=Policy(
            layers=machine,
            writable=[str(path) for path in private],
            readable=[],
            private=[],
            tcp_ports=[],
            protected_pids=[os.getpid()],
        ),
        overlay=overlay,
    )


def bytes_on_disk(*folders):
    """Of all files, counted as `du` does."""
    paths = [path for folder in folders for path in folder.rglob("*")]
    return sum(path.lstat().st_blocks * 512 for path in paths)


async def test_fifty_attempts_change_their_own_workspaces_at_once_for_the_space_of_few(
    workspaces, launcher, machine, template, tmp_path
):
    for number in range(20):
        write(template, {f"assets/{number}": ""})
        (template / f"assets/{number}").write_bytes(os.urandom(10 << 20))
    names = [f"agent{number}" for number in range(50)]
    attempts = {name: attempt(tmp_path, name) for name in names}
    async with prepare(workspaces, template) as made, asyncio.TaskGroup() as group:
        overlays = {name: await workspaces.place(made, attempts[name], machine, timeout_s=60) for name in names}
        specs = {name: agent(attempts[name], overlays[name], machine, name) for name in names}
        running = {name: group.create_task(launcher.run(spec, 300)) for name, spec in specs.items()}
        for name in names:
            while not (attempts[name].home / "ready").exists():
                assert not running[name].done(), (attempts[name].logs / "stderr.txt").read_text()
                await asyncio.sleep(0.01)
        assert bytes_on_disk(tmp_path / "prepared", tmp_path / "run") < 300 << 20
        for name in names:
            (attempts[name].home / "go").touch()
        ended = {name: await task for name, task in running.items()}
        assert {each.code for each in ended.values()} == {0}, (attempts["agent0"].logs / "stderr.txt").read_text()
        for name in names[:3]:
            left = tmp_path / f"left {name}"
            left.mkdir()
            await workspaces.materialise(finished(attempts[name], overlays[name]), left, timeout_s=60)
            assert not os.access(left / "bin/tool", os.X_OK)
            (left / "bin/tool").chmod(0o755)
            assert len(list((left / "assets").iterdir())) == 20
            shutil.rmtree(left / "assets")
            assert tree(left) == changed(name)
        assert bytes_on_disk(made.folder / "assets") == bytes_on_disk(template / "assets")
        shutil.rmtree(made.folder / "assets")
        assert tree(made.folder) == KEPT
    assert list(attempts["agent0"].workspace.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("template", "{folder}/template"),
        ("/srv/template", "/srv/template"),
        ("repos/{name}", "{folder}/repos/{name}"),
        ("{repo}", "{repo}"),
        ("https://example.org/a.git", "https://example.org/a.git"),
        ("git@example.org:a.git", "git@example.org:a.git"),
    ],
)
def test_a_run_file_names_what_lies_beside_it(tmp_path, source, found):
    write(tmp_path, {"install.py": "", "answers.json": "{}"})
    (tmp_path / "run.toml").write_text(
        f"""
        name = "run"
        tasks.train = "tasks.jsonl"
        agent.run = ["true"]
        agent.workspace = {{ source = "{source}", setup = [["python", "install.py"], ["make", "all"]] }}
        scorer = {{ run = ["true"], readable = ["answers.json", "/srv/more"] }}
        """
    )
    config = read_run(Namespace(run_file=tmp_path / "run.toml", overrides=[], unsafe=False, quick=False))
    assert config.agent.workspace.source == found.replace("{folder}", str(tmp_path))
    assert config.agent.workspace.setup == [["python", str(tmp_path / "install.py")], ["make", "all"]]
    assert config.scorer.readable == [str(tmp_path / "answers.json"), "/srv/more"]


def test_workspaces_also_work_as_an_ordinary_user():
    said = run_as_nobody(__file__, "fifty or copy_of_its_own or killed_controller or (commit_is_its_files and path)")
    assert "6 passed" in said, said


SCORE = """
import json, os, pathlib, sys
left = pathlib.Path(json.load(sys.stdin)["attempt"]["workspace"])
lines = (left / "code.py").read_text().splitlines()
print(int(lines[-1].startswith("fixed ") and not (left / "docs").exists() and os.access(left / "run.sh", os.X_OK)))
"""


async def test_rollouts_of_a_run_work_on_commits_that_their_tasks_name_and_are_scored_on_what_they_left(
    client, repository, tmp_path
):
    agent = 'grep -q "$WANT" code.py && echo "fixed $WANT" >> code.py && rm -r docs && test ! -e .git && ls -A'
    runs = tmp_path / "runs"
    config = run_config(
        ["sh", "-ec", agent],
        ["python", "-c", SCORE],
        setup=["sh", "-c", "echo more >> run.sh"],
    )
    agent_section = config.agent.model_copy(
        update={
            "env": {"WANT": "{want}"},
            "workspace": WorkspaceConfig(
                source=str(repository), commit="{base}", setup=[["sh", "-c", f"echo run >> {runs}"]]
            ),
        }
    )
    await client.put_run("run", config.model_copy(update={"agent": agent_section}).to_json())
    wanted = [("v1", "old"), ("main", "solution")] * 3
    specs = [spec(f"r{n}", input={"base": base, "want": want}) for n, (base, want) in enumerate(wanted)]
    async with controlling(client, tmp_path / "run", keep_workspaces=True):
        ended = await settle(client, *specs)
    assert [(rollout.outcome, rollout.reward) for rollout in ended] == [(Outcome.OK, 1.0)] * 6, ended
    assert runs.read_text() == "run\n" * 2
    for rollout, (_, want) in zip(ended, wanted, strict=True):
        left = tmp_path / "run" / "rollouts" / rollout.spec.id / "0" / "left" / "workspace"
        assert tree(left)["code.py"].endswith(f"fixed {want}\n")
        assert not (left.parent / "upper").exists()  # it is in the workspace
        assert "docs" not in tree(left)
        assert (left / "run.sh").read_text() == "#!/bin/sh\nmore\n"
