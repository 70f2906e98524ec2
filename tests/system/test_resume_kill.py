"""A training process that is killed, also while it writes a checkpoint, and goes on as if nothing had been."""

import asyncio
import os
import signal
import textwrap
from contextlib import asynccontextmanager

import pytest

from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.server import engine_app
from manege.gateway.server import Server
from manege.trainer.checkpoint import latest_checkpoint
from tests.lives import FOLDER, of_steps
from tests.system.test_resume import comparable
from tests.system.test_training import ROOT, manege, rows

pytestmark = pytest.mark.anyio

PROGRAMS = """
import json, os, urllib.request
from manege.types import Task

def generate(*, split, num, seed):
    return [Task(id=f"{split}{index}", input={"name": str(index)}) for index in range(num)]

def agent():
    for number in range(2):
        asked = os.environ["MANEGE_ROLLOUT_ID"].partition("-")[2]
        messages = [{"role": "user", "content": f"{os.environ['NAME']} {asked} {number}"}]
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps({"model": "default", "messages": messages, "max_tokens": 4}).encode(),
            {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            print(json.load(response)["choices"][0]["message"]["content"])

def score(task, attempt):
    return sum(word < "n" for word in attempt.stdout.split()) / 2
"""


def write_run(folder, engine_url):
    folder.mkdir()
    (folder / "kill_programs.py").write_text(PROGRAMS)
    run_file = folder / "run.toml"
    run_file.write_text(
        textwrap.dedent(
            f"""
            name = "kill"
            [model]
            path = "{ROOT / "tests" / "tiny" / "model"}"
            [tasks]
            train = "kill_programs:generate"
            num_train = 3
            heldout = "kill_programs:generate"
            num_heldout = 2
            [agent]
            run = "kill_programs:agent"
            env = {{ NAME = "{{name}}" }}
            [scorer]
            run = "kill_programs:score"
            [train]
            steps = 6
            groups = 2
            group_size = 3
            learning_rate = 1e-3
            checkpoint_every = 1
            [gateway]
            engine_url = "{engine_url}"
            """
        )
    )
    return run_file


@asynccontextmanager
async def training(run_file, folder, *words):
    """A process that is dead at the end, with its log beside its folder."""
    with folder.with_suffix(".log").open("a") as log:
        process = manege("train", run_file, f"folder={folder}", *words, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)


async def until(condition, process, *, every_s=0.05):
    async with asyncio.timeout(60):
        while not (found := condition()):
            assert process.poll() is None, "ended early"
            await asyncio.sleep(every_s)
        return found


async def finished(process):
    async with asyncio.timeout(100):
        while process.poll() is None:
            await asyncio.sleep(0.05)
    return process.returncode


async def stopped_while_saving(process, checkpoints):
    """Stop the process when a second checkpoint is half written."""
    while True:
        await until(lambda: latest_checkpoint(checkpoints) and [*checkpoints.glob(".step*")], process, every_s=0.0005)
        os.kill(process.pid, signal.SIGSTOP)
        if [*checkpoints.glob(".step*.partial")]:
            return
        os.kill(process.pid, signal.SIGCONT)


@pytest.fixture
async def engine_url():
    engine = ScriptedEngine(hashed_reply(num_tokens=4, first_id=64, last_id=89))
    app = engine_app(engine, encode=lambda text: FOLDER.tokenizer.encode(text).ids, decode=FOLDER.decode)
    async with Server(app) as server:
        yield server.url
    await engine.close()


async def test_a_killed_training_goes_on_as_if_nothing_had_been(engine_url, tmp_path):
    run_file = write_run(tmp_path / "files", engine_url)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    async with training(run_file, straight) as process:
        assert await finished(process) == 0, straight.with_suffix(".log").read_text()

    checkpoints = killed / "checkpoints"
    async with training(run_file, killed) as process:
        await stopped_while_saving(process, checkpoints)
    half = next(checkpoints.glob(".step*.partial"))
    in_use = latest_checkpoint(checkpoints)
    assert half.name.strip(".") > in_use.name
    async with training(run_file, killed, "--resume") as process:
        await until(lambda: latest_checkpoint(checkpoints) != in_use, process)
        assert not half.exists()
        await until(lambda: len(rows(killed, "step")) == 4, process)

    async with training(run_file, killed, "--resume") as process:
        assert await finished(process) == 0, killed.with_suffix(".log").read_text()
    assert comparable(rows(killed, "step")) == comparable(rows(straight, "step"))
    assert len({row["loss"] for row in of_steps(rows(killed, "step"))}) == 6
    weights = [folder / "model" / "model.safetensors" for folder in (straight, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.full
async def test_a_changed_config_is_shown_and_refused_unless_it_is_allowed(engine_url, tmp_path):
    run_file, folder = write_run(tmp_path / "files", engine_url), tmp_path / "run"
    log = folder.with_suffix(".log")
    async with training(run_file, folder, "train.steps=1") as process:
        assert await finished(process) == 0, log.read_text()
    changes = ["train.steps=2", "train.learning_rate=1e-05", "tasks.num_train=2"]
    async with training(run_file, folder, *changes, "--resume") as process:
        assert await finished(process) == 2
    [line] = [line for line in log.read_text().splitlines() if "another config" in line]
    assert "tasks.num_train: 3 -> 2; train.learning_rate: 0.001 -> 1e-05; train.steps: 1 -> 2. " in line
    assert "--allow-changes" in line
    assert len(rows(folder, "step")) == 1
    moved = folder.rename(tmp_path / "moved")
    async with training(run_file, moved, *changes, "--resume", "--allow-changes") as process:
        assert await finished(process) == 0, moved.with_suffix(".log").read_text()
    assert "changed: train.learning_rate: 0.001 -> 1e-05" in moved.with_suffix(".log").read_text()
    assert [row["learning_rate"] for row in rows(moved, "step")] == pytest.approx([1e-3 / 3, 1e-5 * 2 / 3])
    async with training(run_file, moved, *changes, "--resume") as process:
        assert await finished(process) == 0, moved.with_suffix(".log").read_text()
    assert len(rows(moved, "step")) == 2
