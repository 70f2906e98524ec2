"""SWE-smith's tasks on a cluster: the image of a real package, the shipped run file, the package's own tests."""

import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from manege.config import load_config
from manege.curation.rows import write_rows
from manege.recipes.coding import patches
from manege.recipes.coding.smith import load
from manege.types import Outcome
from tests.harnesses.policy import CONTEXT_LIMIT, from_text, num_turns, tool_call
from tests.harnesses.running import scripted, serving
from tests.system.coding_case import BUG, FAILING, MODULE, PACKAGE, PASSING, RIGHT, prepared
from tests.system.kubernetes.running import api_of, controlling, python, settle, spec

pytestmark = pytest.mark.anyio

MINI = Path.home() / ".cache/manege/harnesses/mini-swe-agent/venv/bin/mini"
AGENT = f"""
from pathlib import Path
def edit(before, after):
    text = Path({MODULE!r}).read_text()
    assert before in text
    Path({MODULE!r}).write_text(text.replace(before, after))
def in_package(code):
    edit("import re\\n", "import re\\n" + code)
ask()
exec(os.environ["PROBLEM_STATEMENT"])
"""
REPAIR = f"edit({BUG!r}, {RIGHT!r})"
HIDES = """
assert not [path for path in Path().rglob("*") if path.name in ("test_inflection.py", ".git")]
assert {path.name for path in Path("/manege").rglob("*")} == {"task", "..data", "task.json"}
"""
OWN_TESTS = """
Path("test_inflection.py").write_text("")
Path("conftest.py").write_text("def pytest_collection_modifyitems(items): items.clear()")
Path("sitecustomize.py").write_text("import os; os._exit(0)")
Path("pytest.ini").write_text("[pytest]\\naddopts = --collect-only")
"""
LINES = """
import json, os, pathlib
for place in pathlib.Path(os.environ["HOME"]).glob("*.jsonl"):
    for test in TESTS:
        place.open("a").write(json.dumps({"token": "mine", "id": test, "outcome": "passed"}) + "\\n")
os._exit(0)
"""
# Undoes the bug while it is tested, by the patch that only the scorer's container has.
HEALS = """
import json
try:
    patch = json.load(open("/manege/hidden/hidden.json"))["hidden"]["patch"].splitlines()
except OSError:
    patch = []
right, wrong = ([line[1:] for line in patch if line[0] == sign and line[1] == " "] for sign in "-+")
source = open(__file__).read().partition("import json")[0]
for before, after in zip(wrong, right):
    source = source.replace(before, after)
exec(source)
"""
# Where the scorer of a pod finds the patch, keys and what it says; each of these would be worth a reward.
REACHES = """
import glob, os, pathlib
told = []
for path in ["/manege/hidden/hidden.json", "/manege/hidden/scorer-key", f"/proc/{os.getppid()}/environ",
             "/proc/1/environ", os.path.join(f"/proc/{os.getppid()}", "root", "manege/hidden/hidden.json"),
             "/manege/pristine/pytest.ini"]:
    try:
        told.append(pathlib.Path(path).read_bytes() and path)
    except OSError:
        pass
for path in ["/dev/termination-log", *glob.glob("/tmp/manege-*"), *glob.glob(f"/proc/{os.getppid()}/fd/*")]:
    try:
        open(path, "a").write('{"reward": 1, "message": "mine"}\\n')
        told.append(path)
    except OSError:
        pass
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            open("/dev/termination-log", "w").write("1")
        except OSError:
            pass
assert not told, told
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
def rows(testbed):
    """In SWE-smith's columns, as many as one likes; the issue tells the agent what to do, as Python."""
    before = (testbed / MODULE).read_text()
    patch = patches.make(MODULE, before, before.replace(RIGHT, BUG))

    def rows(issues):
        return [
            {
                "instance_id": f"{PACKAGE.release}.lm_rewrite__{name}",
                "repo": f"swesmith/jpvanhal__{PACKAGE.release}",
                "patch": patch.replace(MODULE, "gone.py") if name == "of-another-image" else patch,
                "FAIL_TO_PASS": FAILING,
                "PASS_TO_PASS": [*PASSING, "test_more.py::check_more"],
                "image_name": "swesmith.x86_64.inflection",
                "problem_statement": issue,
            }
            for name, issue in issues.items()
        ]

    return rows


@pytest.fixture
def shipped(places, testbed, tmp_path):
    """The run file, but for where this machine has what the image has."""
    text = Path(str(files("manege.recipes.coding") / "cluster.toml")).read_text()
    text = text.replace("/opt/miniconda3/envs/testbed/bin", str(places.python(PACKAGE.name).parent))
    (tmp_path / "cluster.toml").write_text(text.replace("/opt/mini/bin/mini", str(MINI)))
    return load_config(tmp_path / "cluster.toml", [f"kubernetes.workspace={testbed}", "agent.limits.memory_mb=512"])


@pytest.fixture
def carry_out(cluster, namespace, kubelet, rows, tmp_path):
    """Run issues as SWE-smith's tasks."""

    async def run(client, config, issues):
        write_rows(tmp_path / "train.jsonl", rows(issues))
        tasks = load(split="train", num=len(issues), seed=0, file=str(tmp_path / "{split}.jsonl"))
        specs = [spec(task.id.rpartition("__")[2], task=task) for task in tasks]
        async with controlling(client, tmp_path, api_of(cluster, namespace), slots=2):
            ends = await settle(client, config, *specs)
        return {rollout.spec.id: rollout for rollout in ends}

    return run


def cheating(code):
    return f"in_package({code!r})"


async def test_a_repair_in_the_repositorys_image_pays_and_neither_other_work_nor_cheating_does(
    carry_out, shipped, client
):
    issues = {
        "right": HIDES + REPAIR,
        "wrong": "edit('import re', 'import re, os')",
        "half": f"{REPAIR}\nedit('def ordinal(', 'def ordinary(')",
        "own-tests": OWN_TESTS,
        "reaches": cheating(REACHES),
        "heals": f"Path({MODULE!r}).write_text(Path({MODULE!r}).read_text() + {HEALS!r})",
        "lines": cheating(LINES.replace("TESTS", repr(FAILING))),
        "patches-pytest": cheating("import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n"),
        "exits": cheating("import os\nos._exit(0)\n"),
        "of-another-image": "pass",
    }
    scripted_agent = shipped.agent.model_copy(update={"run": python(AGENT)})
    ends = await carry_out(client, shipped.model_copy(update={"agent": scripted_agent}), issues)
    stale = ends.pop("of-another-image")
    assert (stale.outcome, stale.reward) == (Outcome.INFRA_ERROR, None)
    assert "container setup failed with exit code 1: the row's patch does not apply" in stale.message
    assert {name: end.outcome for name, end in ends.items()} == dict.fromkeys(ends, Outcome.OK)
    messages = {name: end.message for name, end in ends.items()}
    assert {name: end.reward for name, end in ends.items()} == {**dict.fromkeys(ends, 0.0), "right": 1.0}, messages
    left = f"FAIL_TO_PASS 0/2, PASS_TO_PASS 4/4; not passed: {', '.join(FAILING)}"
    assert messages["right"] == "FAIL_TO_PASS 2/2, PASS_TO_PASS 4/4"
    assert messages["wrong"] == messages["own-tests"] == messages["reaches"] == messages["heals"] == left
    assert messages["half"].startswith(
        "FAIL_TO_PASS 2/2, PASS_TO_PASS 2/4; not passed: test_inflection.py::test_ordinal[1-1st]"
    )
    assert messages["lines"] == messages["patches-pytest"]
    assert "not pytest's own" in messages["lines"]
    assert "did not come to an end" in messages["exits"]


@pytest.mark.full
@pytest.mark.skipif(not MINI.exists(), reason="manege harness install mini-swe-agent")
async def test_mini_swe_agent_as_a_command_of_the_image_repairs_the_package(carry_out, shipped, tmp_path):
    commands = [
        "pwd; git log; python -c \"import inflection as i; print('seen', i.camelize('two_words'))\"; python -m pytest",
        f"sed -i 's/{BUG}/{RIGHT}/' {MODULE}",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]

    def answer(prompt):
        return "On it.\n" + tool_call("bash", {"command": commands[min(num_turns(prompt), len(commands) - 1)]})

    async with serving(scripted(from_text(answer)), tmp_path, CONTEXT_LIMIT) as client:
        ends = await carry_out(client, shipped, {"mini": "camelize is broken"})
        calls = (await client.calls(["mini"]))["mini"]
    assert (ends["mini"].outcome, ends["mini"].reward) == (Outcome.OK, 1.0), ends["mini"].message
    assert len(calls) == 3
    shown = str([call.request["messages"] for call in calls])
    for words in ("camelize is broken", "seen Two_Words", "not a git repository"):
        assert words in shown
