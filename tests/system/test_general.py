"""The general recipe under the real controller: nothing hidden is in an agent's reach; both of its protocols work."""

import json
from pathlib import Path

import pytest

from manege.config import load_config, parse_config
from manege.recipes.general.families import FAMILIES
from manege.recipes.general.tasks import generate
from manege.types import Outcome, RolloutSpec
from tests.harnesses.policy import from_text, num_turns, tool_call
from tests.harnesses.running import controlling, scripted, serving
from tests.system.test_controller import UNSAFE

pytestmark = pytest.mark.anyio

RUN_FILE = Path(__file__).parents[2] / "src" / "manege" / "recipes" / "general" / "run.toml"
SPY = """
env; cat "$MANEGE_TASK_FILE"; pwd; ls -la . .. "$HOME" "$TMPDIR"
cat ../*.json ../../*.json 2>/dev/null; for file in $(find . "$HOME" "$TMPDIR" -type f 2>/dev/null); do
echo "file $file"; cat "$file"; done; tr '\\0' '\\n' < /proc/self/environ
cat /proc/*/cmdline /proc/*/environ 2>/dev/null
exit 0
"""


def run_config(**agent):
    tree = load_config(RUN_FILE).model_dump(mode="json")
    tree |= {"name": "run", "sampling": {"max_new_tokens": 1024}}
    tree["agent"] |= agent
    return parse_config(tree)


async def ran(folder, config, tasks, reply):
    """The rollouts of these tasks, one each."""
    async with serving(scripted(reply), folder, 8192) as client:
        await client.put_run("run", config.to_json())
        async with controlling(client, folder):
            specs = [RolloutSpec(id=f"r{n}", run="run", task=task, max_attempts=1) for n, task in enumerate(tasks)]
            await client.create_rollouts(specs)
            ended, cursor = {}, 0
            while len(ended) < len(specs):
                page = await client.terminal(run="run", after=cursor, wait_s=30)
                cursor = page.cursor
                ended |= {rollout.spec.id: rollout for rollout in page.rollouts}
    return [ended[spec.id] for spec in specs]


@pytest.mark.skipif(UNSAFE.unsafe, reason="agents cannot be isolated on this machine")
async def test_nothing_hidden_is_in_workspace_environment_or_task_file(tmp_path):
    """A task of each family with marked hidden fields; the agent prints all that it finds."""
    tasks = [
        type(task)(id=task.id, input=task.input, hidden={**task.hidden, "mark": f"HIDDEN-{n}"})
        for n, task in enumerate(generate(split="heldout", num=len(FAMILIES), seed=0, levels=[4]))
    ]
    rollouts = await ran(tmp_path, run_config(run=["bash", "-c", SPY]), tasks, from_text(lambda _: ""))
    for number, (task, rollout) in enumerate(zip(tasks, rollouts, strict=True)):
        assert rollout.reward == 0, (task.id, rollout.message)
        seen = (tmp_path / "rollouts" / f"r{number}" / "0" / "stdout.txt").read_text()
        for name in task.hidden["files"]:
            assert f"file ./{name}" in seen
        assert json.dumps(task.input)[1:-1] in seen
        given = "".join(task.hidden["files"].values()) + str(task.input)
        assert "HIDDEN-" not in seen
        for secret in secrets_of(task.hidden):
            assert secret in given or secret not in seen, (task.id, secret)


def secrets_of(hidden):
    """What the scorer compares with, where it is long enough not to be there by chance."""
    found = [hidden.get("value", ""), *hidden.get("lines", ()), *(stdin for stdin, _ in hidden.get("cases", ()))]
    return [text for text in found if len(text) > 5]


async def test_with_a_tool_the_agent_works_in_its_workspace_and_answers(tmp_path):
    """It looks, fails once, computes, and says what it saw: two tasks of which one asks for a file."""
    find, transform = generate(split="train", num=2, seed=0, families=["find", "transform"], levels=[1])
    source = next(iter(find.hidden["files"]))
    target = transform.hidden["file"]

    def policy(prompt):
        if source in prompt:
            steps = [
                tool_call("bash", {"command": f"cat no-{source}"}),
                tool_call("bash", {"command": f"cat {source}"}),
            ]
            found = prompt.rpartition("code=")[2][:3]
            return [*steps, f"The file says it.\n{found}"][min(num_turns(prompt), 2)]
        command = f"sort {next(iter(transform.hidden['files']))} > {target}"
        return [tool_call("bash", {"command": command}), "done"][min(num_turns(prompt), 1)]

    config = run_config(env={"QUESTION": "{task}"})
    rollouts = await ran(tmp_path, config, [find, transform], from_text(policy))
    assert [(r.outcome, r.reward) for r in rollouts] == [(Outcome.OK, 1.0)] * 2, [
        r.evidence["stdout_tail"] for r in rollouts
    ]
    assert [r.evidence["num_calls"] for r in rollouts] == [3, 2]


async def test_in_plain_text_the_agent_runs_one_command_a_turn(tmp_path):
    """The commands are those of its demonstration, for the three families of the run."""
    tasks = generate(split="heldout", num=3, seed=0, families=["find", "compute", "longdoc"], levels=[1])

    def policy(prompt):
        question = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        words = question.rstrip(".").split()
        if question.startswith("Read"):
            return f"cat {words[-1]}"
        if question.startswith("Count"):
            return f"wc -l {words[-1]}"
        if question.startswith("Find"):
            return f"grep {words[4]} {words[-1]}"
        return f"echo {words[0] if len(words) == 2 else question.replace('=', ' ').split()[-1]}"

    rollouts = await ran(tmp_path, run_config(), tasks, from_text(policy))
    assert [(r.outcome, r.reward) for r in rollouts] == [(Outcome.OK, 1.0)] * 3, [
        r.evidence["stdout_tail"] for r in rollouts
    ]


@pytest.mark.harnesses
async def test_a_known_harness_does_the_task_by_one_setting(tmp_path):
    """mini-SWE-agent, told `task`; its answer is in a file."""
    (task,) = generate(split="train", num=1, seed=0, families=["find"], levels=[1])
    source = next(iter(task.hidden["files"]))
    done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

    def policy(prompt):
        steps = [f"sed 's/code=//' {source} > answer.txt", done]
        return tool_call("bash", {"command": steps[min(num_turns(prompt), 1)]})

    config = run_config(run=None, harness="mini-swe-agent", env={})
    (rollout,) = await ran(tmp_path, config, [task], from_text(policy))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.message
