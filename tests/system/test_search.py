"""The search recipe end to end: the service of its run file over a generated corpus, and each of its agents in the
sandbox, with a scripted policy as their model that answers only what it was shown."""

import shutil
from pathlib import Path

import pytest

from manege.cli.arguments import with_files_of
from manege.cli.services import services_started
from manege.config import RunConfig, load_config
from manege.harnesses.harness import load
from manege.harnesses.install import find, root_folder
from manege.recipes.search.tasks import generate
from manege.types import Outcome, RolloutSpec
from tests.harnesses.policy import from_text, num_turns, tool_call
from tests.harnesses.running import controlling, scripted, serving
from tests.system.test_controller import settle

pytestmark = pytest.mark.anyio

RECIPE = Path(__file__).parents[2] / "src" / "manege" / "recipes" / "search"
AGENTS = [
    "text",
    "tools",
    "openai-agents",
    pytest.param("langgraph", marks=pytest.mark.harnesses),
]
NUM = 400


def run_of(agent, folder):
    """The run file, over a smaller world, with one of the agents."""
    tree = load_config(RECIPE / "run.toml", [f"folder={folder}"]).to_json()
    service = tree["services"]["search"]["run"]
    service[2] = service[2].replace('corpus.jsonl" --facts 1 &&', f'corpus.jsonl" --num {NUM} --facts 3 &&')
    assert f"--num {NUM}" in service[2]
    env = {"QUESTION": "{question}", "SEARCH_PROTOCOL": "text" if agent == "text" else "tools", "SEARCH_TOP_K": "2"}
    tree["agent"]["env"] = env
    tree["agent"]["limits"]["run_s"], tree["sampling"]["max_new_tokens"] = 150, 512
    if agent not in ("text", "tools"):
        installed = find(load(agent), root_folder())
        tree["agent"]["run"] = [installed.program("python"), f"with_{agent.replace('-', '_')}.py"]
        tree["sandbox"]["readable"] = list(installed.readable)
    return with_files_of(RECIPE, RunConfig.model_validate(tree))


def policy(tasks, *, by_text, answers=True):
    """Search for what the chain names, step by step; the answer, if all of its facts were shown, else a guess."""

    def act(prompt):
        task = next(task for task in tasks if task.input["question"] in prompt)
        asked = prompt.rpartition(task.input["question"])[2]
        chain, turn = task.hidden["chain"], num_turns(asked)
        if turn < len(chain):
            title = chain[turn]["title"]
            return f"search {title}" if by_text else tool_call("search", {"query": title})
        known = all(step["fact"] in asked for step in chain)
        # SEARCH_TOP_K passages, a line each, were asked for.
        observed = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        known = known and not (by_text and observed.count("\n") > 1)
        said = task.hidden["answers"][0] if known and answers else "Nowhere"
        return f"answer {said}" if by_text else said

    return scripted(from_text(act))


async def rewards_of(config, engine, tasks, folder):
    async with services_started(config) as config, serving(engine, folder, 8192) as client:
        await client.put_run("run", config.to_json())
        async with controlling(client, folder):
            specs = [RolloutSpec(id=task.id, run="run", task=task, max_attempts=1) for task in tasks]
            ended = await settle(client, *specs)
    for rollout in ended:
        assert rollout.outcome is Outcome.OK, (rollout.message, rollout.evidence)
    return [(rollout.reward, rollout.message) for rollout in ended]


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_finds_the_answer_through_the_service_of_its_run(agent, tmp_path):
    tasks = [generate(split="train", num=1, seed=7, hops=[hops], num_entities=NUM)[0] for hops in (1, 3)]
    ended = await rewards_of(run_of(agent, tmp_path), policy(tasks, by_text=agent == "text"), tasks, tmp_path)
    assert ended == [
        (1.0, "exact match 1, F1 1.00, 1 of 1 facts read"),
        (1.0, "exact match 1, F1 1.00, 3 of 3 facts read"),
    ]


async def test_who_reads_all_and_answers_wrongly_gets_the_part_and_who_gives_up_gets_nothing(tmp_path):
    tasks = generate(split="train", num=2, seed=7, hops=[2], num_entities=NUM)
    wrong, silent = policy(tasks[:1], by_text=True, answers=False), "I do not know"
    config = run_of("text", tmp_path)
    [(reward, message)] = await rewards_of(config, wrong, tasks[:1], tmp_path)
    assert (reward, message) == (0.3, "exact match 0, F1 0.00, 2 of 2 facts read")
    shutil.rmtree(tmp_path / "workspaces")
    (tmp_path / "store.db").unlink()
    ended = await rewards_of(config, scripted(from_text(lambda _: silent)), tasks[1:], tmp_path)
    assert ended == [(0.0, "no answer, 0 of 2 facts read")]
