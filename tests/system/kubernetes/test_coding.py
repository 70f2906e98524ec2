"""SWE-smith's tasks on a cluster: the image of a real package, the shipped run file, the package's own tests."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from manege.config import load_config
from manege.recipes.coding import patches
from manege.recipes.coding.smith import load
from manege.types import Outcome
from tests.system.coding_case import BUG, FAILING, MODULE, PACKAGE, PASSING, RIGHT, prepared
from tests.system.kubernetes.running import api_of, controlling, python, settle, spec

pytestmark = pytest.mark.anyio

IMAGE_PYTHON = "/opt/miniconda3/envs/testbed/bin/python"
REPAIR = f"edit({BUG!r}, {RIGHT!r})"
EDIT = f"""
from pathlib import Path
def edit(before, after):
    text = Path({MODULE!r}).read_text()
    assert before in text
    Path({MODULE!r}).write_text(text.replace(before, after))
"""


@pytest.fixture(scope="module")
def places():
    return prepared()


@pytest.fixture
def testbed(places, tmp_path):
    """Where the image holds its repository, whose tests need its configuration and tell what the fix is."""
    folder = tmp_path / "testbed"
    shutil.copytree(places.source(PACKAGE.name), folder)
    (folder / "pytest.ini").write_text("[pytest]\npython_functions = test_* check_*\n")
    (folder / "test_more.py").write_text("import inflection\ndef check_more(): assert inflection.ordinal(2) == 'nd'\n")
    return folder


@pytest.fixture
def task(testbed, tmp_path):
    """As a row of SWE-smith's says it."""
    before = (testbed / MODULE).read_text()
    row = {
        "instance_id": f"{PACKAGE.release}.lm_rewrite__1",
        "repo": f"swesmith/jpvanhal__{PACKAGE.release}",
        "patch": patches.make(MODULE, before, before.replace(RIGHT, BUG)),
        "FAIL_TO_PASS": FAILING,
        "PASS_TO_PASS": [*PASSING, "test_more.py::check_more"],
        "image_name": "swesmith.x86_64.inflection",
        "problem_statement": "camelize is broken",
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    (task,) = load(split="train", num=1, seed=0, file=str(tmp_path / "{split}.jsonl"))
    return task


@pytest.fixture
def carry_out(client, cluster, namespace, kubelet, places, testbed, task, tmp_path):
    """Run the task with the shipped run file; only the agent's command and where the image keeps things are others."""

    async def run(agent):
        file = Path(str(files("manege.recipes.coding") / "cluster.toml"))
        config = load_config(file, [f"kubernetes.workspace={testbed}", "agent.limits.memory_mb=256"])
        interpreter = str(places.python(PACKAGE.name))
        programs = {
            part: [interpreter if word == IMAGE_PYTHON else word for word in command]
            for part, command in (("setup", config.agent.setup), ("score", config.scorer.run))
        }
        agent_changes = {"run": python(f"ask()\n{EDIT}\n{agent}"), "setup": programs["setup"]}
        config = config.model_copy(
            update={
                "agent": config.agent.model_copy(update=agent_changes),
                "scorer": config.scorer.model_copy(update={"run": programs["score"]}),
            }
        )
        async with controlling(client, tmp_path, api_of(cluster, namespace)):
            (rollout,) = await settle(client, config, spec(task=task))
        return rollout

    return run


async def test_a_repair_resolves_the_task_in_the_repositorys_image(carry_out):
    rollout = await carry_out(REPAIR)
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.message
    assert rollout.message == "FAIL_TO_PASS 2/2, PASS_TO_PASS 4/4"
