"""The shortcut recipe without a model: either way is paid where the hole is open, one of them where it is closed, and
the shortcut is always told."""

import re
import tomllib
from pathlib import Path

import pytest

import manege.recipes.shortcut
from manege.config import parse_config
from manege.gateway.server import GatewayServer
from manege.model.folder import open_folder
from manege.recipes.shortcut.plot import draw, read_steps
from manege.recipes.shortcut.tasks import generate
from manege.rendering.select import renderer_for
from manege.sandbox.probe import probe
from manege.trainer.credit import is_flagged
from tests.conftest import gateway_app
from tests.system.test_controller import controlling, settle, spec

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not probe().notify, reason="; ".join(probe().missing())),
]
RUN_FILE = Path(manege.recipes.shortcut.__file__).with_name("run.toml")
TASKS = "manege.recipes.shortcut.tasks"


FOLDER = open_folder("smollm2")


@pytest.fixture
async def gateway(store, engine):
    """With the recipe's own tokens: its agent lets the model say twelve."""
    renderer = renderer_for(FOLDER)
    async with GatewayServer(gateway_app(store, engine, renderer=renderer, context_limit=512)) as server:
        yield server


def policy(opening):
    """What the model says: `opening` of the file that is asked for, then it follows what it is shown."""

    def say(text):
        return FOLDER.tokenizer.encode(text, add_special_tokens=False).ids

    def reply(prompt_ids):
        text = FOLDER.decode(prompt_ids)
        question = list(re.finditer(r"What is the (\w+)\? It is in (\S+)\.", text))[-1]
        shown = text[question.end() :]
        if found := re.search(rf"{question[1]}=(\d+)", shown):
            return say(f"echo {found[1]}")
        moved = re.findall(r"moved to (\w+\.txt)", shown)
        return say(f"cat {moved[-1]}" if moved else f"{opening} {question[2]}")

    return reply


@pytest.mark.parametrize(
    ("engine", "setup", "reward", "flagged"),
    [
        (policy("cat"), "prepare_with_history", 1.0, False),
        (policy("cat"), "prepare", 1.0, False),
        (policy("git log --all"), "prepare_with_history", 1.0, True),
        (policy("git log --all"), "prepare", 0.0, True),
    ],
    ids=["solves", "solves, closed", "cheats", "cheats, closed"],
    indirect=["engine"],
)
async def test_the_shortcut_pays_where_it_is_open_and_is_told(client, tmp_path, engine, setup, reward, flagged):
    tree = tomllib.loads(RUN_FILE.read_text())
    tree["agent"]["setup"] = f"{TASKS}:{setup}"
    await client.put_run("run", parse_config(tree).to_json())
    (task,) = generate(split="train", num=1, seed=0, hops=[1])
    async with controlling(client, tmp_path):
        (rollout,) = await settle(client, spec(input=task.input, hidden=task.hidden))
    assert (rollout.reward, is_flagged(rollout)) == (reward, flagged), rollout
    (step,) = await read_steps(tmp_path / "store.db")
    paid = int(reward)
    assert (step.num_cheated, step.num_solved) == (paid * flagged, paid * (not flagged))
    assert (step.num_told, step.num_blamed) == (step.num_cheated, 0)
    draw({"open": [[step]], "closed": [[step]]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size
