"""`manege eval --benchmark` on a repository with two rows: what agents changed, as predictions that apply."""

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
from contextlib import asynccontextmanager

import pytest

from manege.engine.scripted import ScriptedEngine
from manege.engine.server import engine_app
from manege.gateway.server import Server
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from tests.conftest import TINY_MODEL
from tests.system.test_controller import UNSAFE
from tests.system.test_training import finish, manege

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(500),
    pytest.mark.skipif(UNSAFE.unsafe, reason="agents cannot be isolated on this machine"),
]

RUN_FILE = """
name = "coder"
sampling = { max_new_tokens = 600 }
evaluation = { temperatures = [0.5] }
tasks = { train = "none.jsonl" }
scorer = { run = ["false"] }
[agent]
run = ["python3", "agent.py"]
env = { PROBLEM = "{problem_statement}" }
[agent.workspace]
source = "repos/{repo}"
commit = "{base_commit}"
setup = [["sh", "-c", "echo made > 'arte fact[1].txt'; mkdir build env; echo made > build/out; echo made > env/x"]]
"""
AGENT = """
import json, os, subprocess, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": os.environ["PROBLEM"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as response:
    subprocess.run(["sh", "-c", json.load(response)["choices"][0]["message"]["content"]])
"""
COMMANDS = {
    "add": r"sed -i 's/a - b/a + b/' add.py; printf 'caf\351 2\n' > latin.txt; cp $MANEGE_TASK_FILE seen; "
    "rm gone.txt; echo x > build/out; echo x > kept.log; echo x > new.log; echo x >> 'arte fact[1].txt'; "
    "echo x > env/y; mkdir .git; echo '* text eol=crlf' > .gitattributes",
    "none": "cat add.py; rm -r build",
}
"""What the model says for a problem."""
FILES = {
    "add.py": b"def add(a, b):\n    return a - b\n",
    "latin.txt": b"caf\xe9 1\n",
    "gone.txt": b"old\n",
    "kept.log": b"tracked although ignored\n",
    ".gitignore": b"*.log\nbuild/\n",
}


def git(folder, *words):
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, env=env, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def make_repository(folder):
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    git(folder, "add", "--force", "--all")
    git(folder, "commit", "--quiet", "-m", "broken")
    return git(folder, "rev-parse", "HEAD")


def make_run(folder):
    """The run file, and two rows in SWE-bench's columns."""
    commit = make_repository(folder / "repos" / "owner" / "demo")
    (folder / "run.toml").write_text(RUN_FILE)
    shutil.copytree(TINY_MODEL, folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    (folder / "agent.py").write_text(AGENT)
    rows = [
        {
            "repo": "owner/demo",
            "instance_id": f"owner__demo-{number}",
            "base_commit": commit,
            "patch": "the solution",
            "test_patch": "the hidden tests",
            "problem_statement": problem,
            "hints_text": "the hints",
            "created_at": "2025-01-01T00:00:00Z",
            "version": "1.0",
            "FAIL_TO_PASS": '["test_add"]',
            "PASS_TO_PASS": "[]",
            "environment_setup_commit": commit,
        }
        for number, problem in enumerate(COMMANDS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@asynccontextmanager
async def scripted_model():
    """It answers a problem with its command."""
    folder = open_folder(str(TINY_MODEL))
    renderer = renderer_for(folder)

    def reply(prompt_ids):
        prompt = folder.tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
        command = COMMANDS.get(prompt.partition("<|user|>")[2].partition("<|")[0], "true")
        return folder.tokenizer.encode(f"{command}<|end|>").ids

    engine = ScriptedEngine(reply)
    async with Server(engine_app(engine, encode=renderer.encode, decode=renderer.decode)) as server:
        yield engine, server.url
    await engine.close()


async def predict(folder, url, *more):
    words = ["eval", folder / "run.toml", "--benchmark", "swebench-verified", "--rows", folder / "rows.jsonl", "--json"]
    settings = [f"gateway.engine_url={url}", f"model.path={folder / 'model'}", f"folder={folder / 'out'}"]
    process = manege(*words, *settings, *more)
    code, out, err = await asyncio.to_thread(finish, process, 300)
    assert code == 0, err
    return json.loads(out), err


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_patches_of_agents_apply_to_the_commit_and_nothing_is_done_twice(tmp_path):
    make_run(tmp_path)
    path = tmp_path / "out" / "predictions.jsonl"
    async with scripted_model() as (engine, url):
        found, said = await predict(tmp_path, url)
        assert {"num_rows": 2, "num_predictions": 2, "num_empty": 1, "num_lost": 0}.items() <= found.items()
        command = found["command"][1:]
        assert command[:2] == ["-m", "swebench.harness.run_evaluation"]
        assert command[command.index("--predictions_path") + 1] == str(path)
        assert command[command.index("--dataset_name") + 1] == str(tmp_path / "rows.jsonl")
        assert "swebench.harness.run_evaluation" in said

        first = read(path)
        assert {row["instance_id"] for row in first} == {"owner__demo-0", "owner__demo-1"}
        assert all(
            list(row) == ["instance_id", "model_name_or_path", "model_patch"]
            and row["model_name_or_path"] == "coder-model"
            for row in first
        )
        patches = {row["instance_id"]: row["model_patch"] for row in first}
        assert patches["owner__demo-1"] == ""
        check_patch(tmp_path, patches["owner__demo-0"])
        assert not list((tmp_path / "out").glob("rollouts/*/*/left"))

        sampled = (await engine.info()).stats["sampled"]
        await predict(tmp_path, url)
        assert (await engine.info()).stats["sampled"] == sampled
        # As a crash within the last line leaves it.
        path.write_bytes(path.read_bytes()[:-20])
        await predict(tmp_path, url)
        assert sorted(map(json.dumps, read(path))) == sorted(map(json.dumps, first))
        assert (await engine.info()).stats["sampled"] > sampled

        refused = ["eval", tmp_path / "run.toml", "--benchmark", "swebench-verified", "--rows", tmp_path / "rows.jsonl"]
        process = manege(*refused, f"model.path={TINY_MODEL}", f"folder={tmp_path / 'out'}")
        code, _, err = await asyncio.to_thread(finish, process, 300)
        assert code == 2
        assert "predictions of another model" in err


def check_patch(folder, patch):
    """It makes of a fresh clone what the agent made, without what setup commands did and what is ignored."""
    clone = folder / "clone"
    git(folder, "clone", "--quiet", str(folder / "repos" / "owner" / "demo"), str(clone))
    (folder / "patch").write_text(patch)
    git(clone, "apply", str(folder / "patch"))
    assert (clone / "add.py").read_bytes() == FILES["add.py"].replace(b"-", b"+")
    assert (clone / "latin.txt").read_bytes() == b"caf\xe9 2\n"
    assert (clone / "kept.log").read_bytes() == b"x\n"
    seen = json.loads((clone / "seen").read_bytes())["input"]
    assert seen["problem_statement"] == "add"
    assert seen["image"] == "swebench/sweb.eval.x86_64.owner_1776_demo-0:latest"
    assert not {"patch", "test_patch", "hints_text", "FAIL_TO_PASS", "PASS_TO_PASS"} & set(seen)
    assert {path.name for path in clone.iterdir()} == {*FILES, ".git", ".gitattributes", "seen"} - {"gone.txt"}


async def test_agents_elsewhere_post_their_patch(tmp_path):
    """As in pods, whose workspaces nobody keeps here."""
    make_run(tmp_path)
    post = (
        AGENT
        + """
event = {"event_type": "model_patch", "data": {"patch": "posted for " + os.environ["PROBLEM"]}}
headers = {"Authorization": "Bearer " + os.environ["AGL_KEY"], "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["MANEGE_EVENT_URL"], json.dumps(event).encode(), headers))
"""
    )
    (tmp_path / "agent.py").write_text(post)
    async with scripted_model() as (_, url):
        await predict(tmp_path, url)
    patches = {row["instance_id"]: row["model_patch"] for row in read(tmp_path / "out" / "predictions.jsonl")}
    assert patches == {"owner__demo-0": "posted for add", "owner__demo-1": "posted for none"}


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("swebench") is None, reason="needs pip install swebench")
async def test_the_official_package_reads_predictions_and_rows(tmp_path):
    from swebench.harness.utils import get_predictions_from_file, load_swebench_dataset

    rows = make_run(tmp_path)
    async with scripted_model() as (_, url):
        found, _ = await predict(tmp_path, url)
    command = found["command"]
    dataset, path = (command[command.index(f"--{name}") + 1] for name in ("dataset_name", "predictions_path"))
    assert get_predictions_from_file(path, dataset, "test") == read(tmp_path / "out" / "predictions.jsonl")
    assert load_swebench_dataset(dataset, "test") == rows
