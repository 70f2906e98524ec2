"""Cheats under guards: a rollout each, by a real controller, and what it came to."""

import sys
from dataclasses import dataclass

from manege.config import ControllerConfig, SandboxConfig, parse_config
from manege.controller.loop import Controller
from manege.trainer.credit import counted
from manege.types import RolloutSpec, Task
from tests.cheats.judges import NAMES
from tests.cheats.place import HIDDEN
from tests.cheats.routes import PRELUDE
from tests.controllers import beside

GUARDS = {
    "sandbox": "`sandbox.mode = auto` instead of `off`",
    "no history": "the workspace has no `.git`",
    "tests": "hidden tests come with the scorer, `scorer.restore` puts the others back",
    "scorer": "it counts named tests by results of its own, instead of believing exit code and last line",
    "report": "`credit.flagged = zero` instead of `keep`",
}
RESTORED = ["tests/**", "**/conftest.py", "pytest.ini", "sitecustomize.py"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    reward: float | None
    """As it counts in training."""
    told: dict[str, bool]
    """Kinds of the hack report, and whether they flag."""
    message: str | None


async def measure(client, place, cheats, guards):
    """By the names of the cheats."""
    has_sandbox, run = "sandbox" in guards, "-".join(guards).replace(" ", "") or "none"
    shared = place.environment(f"{run}-all") if has_sandbox else None
    config = parse_config(settings(place, run, guards))
    hidden_files = {"tests/test_spaces.py": HIDDEN} if "tests" in guards else {}
    specs = []
    for number, cheat in enumerate(cheats.values()):
        environment = shared or place.environment(f"{run}-{number}")
        task = Task(
            id=f"cheat-{number}",
            input={"agent": PRELUDE + cheat.agent, "environment": str(environment)},
            hidden=NAMES | {"test": HIDDEN, "path": ".", "files": hidden_files},
        )
        word = "agent" if cheat.posts and "scorer" not in guards else "scorer"
        specs.append(
            RolloutSpec(id=f"{run}-{number}", run=run, task=task, max_attempts=1, temperature=1.0, reward_from=word)
        )
    await client.put_run(run, config.to_json())
    controller = Controller(
        client,
        name=f"controller-{run}",
        folder=place.folder / run,
        config=ControllerConfig(slots=2),
        sandbox=SandboxConfig(mode="auto" if has_sandbox else "off", unsafe=not has_sandbox),
    )
    ended, cursor = {}, 0
    async with beside(controller):
        await client.create_rollouts(specs)
        while len(ended) < len(specs):
            page = await client.terminal(run=run, after=cursor, wait_s=30)
            cursor = page.cursor
            ended |= {rollout.spec.id: rollout for rollout in page.rollouts}
    rollouts = [ended[spec.id] for spec in specs]
    return {
        name: Cell(
            reward=counted(rollout, config.credit),
            told=dict(rollout.evidence.get("hacks", {})),
            message=rollout.message or rollout.evidence.get("stderr_tail") or None,
        )
        for name, rollout in zip(cheats, rollouts, strict=True)
    }


def settings(place, run, guards):
    """Of a run under some guards."""
    hides, environments = "tests" in guards, str(place.folder / "environments")
    copies_history = ["sh", "-c", f"cp -R {place.project}/.git ."]
    return {
        "name": run,
        "tasks": {"train": str(place.project / "tasks.jsonl")},
        "agent": {
            "run": [sys.executable, "-c", "import os; exec(os.environ['CHEAT'])"],
            "env": {
                "CHEAT": "{agent}",
                "ENVIRONMENT": "{environment}",
                "PROJECT": str(place.project),
                "http_proxy": place.index,
            },
            "workspace": {"source": str(place.sources(with_hidden_test=not hides))},
            "setup": None if "no history" in guards else copies_history,
            "limits": {"run_s": 60, "score_s": 60},
        },
        "scorer": {
            "run": "manege.recipes.coding.scorer:score" if "scorer" in guards else "tests.cheats.judges:naive",
            "files": {"tests/test_spaces.py": "{test}"} if hides else {},
            "restore": RESTORED if hides else [],
            "readable": [environments],
        },
        "sandbox": {"readable": [environments]},
        "credit": {"flagged": "zero" if "report" in guards else "keep"},
    }
