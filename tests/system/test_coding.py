"""A real agent repairs a real package: mini-SWE-agent with a scripted model, in the sandbox, judged by hidden tests."""

import asyncio
from importlib.resources import files
from pathlib import Path

import pytest

from manege.cli.arguments import with_files_of
from manege.config import load_config
from manege.types import RolloutSpec
from tests.harnesses.policy import CONTEXT_LIMIT, from_text, num_turns, tool_call
from tests.harnesses.running import controlling, scripted, serving
from tests.system.coding_case import BUG, MODULE, OTHER_BUG, OTHER_RIGHT, RIGHT, prepared, task_of

pytestmark = pytest.mark.anyio
LOOK = (
    """python -c "import inflection as i; print('seen', i.__file__, i.camelize('two_words'))"; ls; python -m pytest"""
)
REPAIR = f"sed -i 's/{BUG}/{RIGHT}/' {MODULE}"
TAMPER = "echo 'def pytest_collection_modifyitems(items): items.clear()' > conftest.py"
COMMANDS = [LOOK, REPAIR, TAMPER, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
OTHER_FAILING = ["test_inflection.py::test_underscore[SpecialGuest-special_guest]"]


async def test_what_the_agent_repairs_pays_and_the_same_work_on_another_bug_does_not(tmp_path):
    places = prepared()
    file = Path(str(files("manege.recipes.coding") / "run.toml"))
    readable = [str(places.folder / "environments")]
    overrides = [f"{section}.readable={readable}" for section in ("sandbox", "scorer")]
    config = with_files_of(file.parent, load_config(file, ["agent.limits.run_s=150", *overrides]))
    tasks = {"right": task_of(places), "wrong": task_of(places, OTHER_RIGHT, OTHER_BUG, OTHER_FAILING)}

    def answer(prompt):
        command = COMMANDS[min(num_turns(prompt), len(COMMANDS) - 1)]
        return "On it.\n" + tool_call("bash", {"command": command})

    async with serving(scripted(from_text(answer)), tmp_path, CONTEXT_LIMIT) as client:
        await client.put_run("run", config.to_json())
        async with controlling(client, tmp_path):
            specs = [RolloutSpec(id=name, run="run", task=task, max_attempts=1) for name, task in tasks.items()]
            await client.create_rollouts(specs)
            async with asyncio.timeout(170):
                after, ended = 0, {}
                while len(ended) < len(tasks):
                    page = await client.terminal(run="run", after=after, wait_s=30)
                    after = page.cursor
                    ended |= {rollout.spec.id: rollout for rollout in page.rollouts}
        calls = await client.calls(list(tasks))
        changed = await client.events("right", "hack.tests")
    right, wrong = ended["right"], ended["wrong"]
    assert (right.outcome, right.reward) == ("ok", 1.0), right.message
    assert right.message == "FAIL_TO_PASS 2/2, PASS_TO_PASS 3/3"
    assert (wrong.outcome, wrong.reward) == ("ok", 0.0), wrong.message
    assert wrong.message == f"FAIL_TO_PASS 0/1, PASS_TO_PASS 3/3; not passed: {OTHER_FAILING[0]}"
    assert [len(calls[name]) for name in tasks] == [4, 4]
    # The package is the workspace's, with pytest beside it; the tests that show the bug are away.
    shown = str(calls["right"][1].request["messages"])
    assert "workspace/inflection/__init__.py Two_Words" in shown
    assert "test_inflection.py" not in shown
    assert "no tests ran" in shown
    # What pytest would have read of the agent's is gone before the tests run, and told.
    assert [item["detail"] for event in changed for item in event.data["items"]] == ["conftest.py"]
