"""Samples per rollout of real harnesses, with the gateway's continuation and without it.

    .venv/bin/python -m benchmarks.fragmentation

Real harnesses, unmodified, do a coding task of 8 to 12 turns through gateway, controller and sandbox. Their model says
what a real one sampled (`fragmentation_thoughts`) before each tool call of a script (`fragmentation_engine`).

    on    the gateway holds the tokenizer and continues the ids that were sampled
    off   the gateway passes messages on to an engine that tokenises the whole history again at every call; calls are
          put together by token prefix, as far as they fit

Off is how https://arxiv.org/abs/2608.17528 trained; it reports 2.41 samples per rollout and 36 % with one sample.
"""

import argparse
import asyncio
import secrets
import statistics
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.fragmentation_engine import chat_app, exercise, fragmentation_renderer, thinking_reply
from benchmarks.fragmentation_thoughts import MODEL, Thought, kept_thoughts
from manege.client import Client
from manege.config import RunConfig
from manege.engine.scripted import ScriptedEngine
from manege.gateway.app import create_app
from manege.gateway.members import Registration
from manege.gateway.server import GatewayServer, Server
from manege.model.folder import open_folder
from manege.store.sql import SqlStore
from manege.trainer.algo.branches import branches
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.types import Call, RolloutId, RolloutSpec, RunId, Task
from tests.conftest import OPERATOR_KEY
from tests.harnesses.policy import CONTEXT_LIMIT, TASK
from tests.harnesses.running import controlling
from tests.harnesses.table import ROWS

HARNESSES = ("mini-swe-agent", "claude-code", "codex")
THOUGHTS = Path("build") / "fragmentation-thoughts.json"
NUM_THOUGHTS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rollout."""

    reward: float | None
    num_calls: int
    """Of its main thread; a title or the like is a sample of its own, whoever serves it."""
    num_samples: int
    """Of its main thread."""
    causes: Counter[str]
    """Why there is more than one: branches by kind."""
    num_sampled: int
    num_trained: int
    num_context: int
    """Tokens of all samples that are read and not trained."""


async def measure(
    harness: str, thoughts: Sequence[Thought], *, continued: bool, num_rollouts: int, folder: Path
) -> list[Measured]:
    """Rollouts of the exercises 0, 1, ..., to their ends."""
    config = RunConfig.model_validate(
        {
            "name": "run",
            "tasks": {"train": "tasks.jsonl"},
            "agent": {
                "harness": harness,
                "setup": "tests.harnesses.programs:prepare",
                "limits": {"run_s": 300},
            },
            "scorer": {"run": "tests.harnesses.programs:score"},
        }
    )
    names = [RolloutId(f"r{number}") for number in range(num_rollouts)]
    async with _serving(harness, thoughts, continued=continued, folder=folder) as client:
        await client.put_run(RunId("run"), config.to_json())
        await client.create_rollouts([_spec(name, number) for number, name in enumerate(names)])
        ended = {}
        after = 0
        async with controlling(client, folder):
            while len(ended) < num_rollouts:
                page = await client.terminal(run=RunId("run"), after=after, wait_s=30)
                ended |= {rollout.spec.id: rollout for rollout in page.rollouts}
                after = page.cursor
        calls = await client.calls(names)
    return [_measured(calls[name], ended[name].reward) for name in names]


def _spec(name: RolloutId, number: int) -> RolloutSpec:
    words = [f"secret-{secrets.token_hex(6)}" for _ in range(3)]
    task = Task(id=name, input={"task": exercise(number, TASK)}, hidden={"words": words})
    return RolloutSpec(id=name, run=RunId("run"), task=task, max_attempts=1)


@asynccontextmanager
async def _serving(
    harness: str, thoughts: Sequence[Thought], *, continued: bool, folder: Path
) -> AsyncIterator[Client]:
    renderer = fragmentation_renderer()
    engine = ScriptedEngine(
        thinking_reply(ROWS[harness].shell, thoughts, renderer), context_limit=CONTEXT_LIMIT, chunk_size=8
    )
    store = await SqlStore.open(folder / "store.db")
    app = create_app(
        store=store,
        engine=engine if continued else None,
        renderer=renderer if continued else None,
        operator_key=OPERATOR_KEY,
        model_name=MODEL,
        context_limit=CONTEXT_LIMIT,
    )
    try:
        async with (
            Server(chat_app(engine, renderer)) as elsewhere,
            GatewayServer(app) as server,
            Client(server.url, OPERATOR_KEY) as client,
        ):
            if not continued:
                await server.services.engine.register([Registration(model=MODEL, endpoint=elsewhere.url)])
            yield client
    finally:
        await engine.close()
        await store.close()


def _measured(calls: Sequence[Call], reward: float | None) -> Measured:
    main = [call for call in calls if call.thread == "main"]
    forest = build_forest(main)
    samples, _ = build_samples(forest)
    num_trained = sum(sample.num_trained for sample in samples)
    return Measured(
        reward=reward,
        num_calls=len(main),
        num_samples=len(samples),
        causes=Counter(str(branch.kind) for branch in branches(forest, open_folder(MODEL).decode)),
        num_sampled=sum(len(call.response_ids_R) for call in main),
        num_trained=num_trained,
        num_context=sum(len(sample.ids_T) for sample in samples) - num_trained,
    )


def _row(harness: str, mode: str, rollouts: Sequence[Measured]) -> list[str]:
    counts = [rollout.num_samples for rollout in rollouts]
    causes = sum((rollout.causes for rollout in rollouts), Counter[str]())
    return [
        harness,
        mode,
        str(len(rollouts)),
        f"{statistics.mean(rollout.num_calls for rollout in rollouts):.1f}",
        f"{statistics.mean(counts):.2f}",
        f"{min(counts)}-{max(counts)}",
        f"{100 * counts.count(1) / len(counts):.0f} %",
        ", ".join(f"{cause} {number}" for cause, number in causes.most_common()) or "none",
        f"{sum(rollout.num_trained for rollout in rollouts) / sum(rollout.num_sampled for rollout in rollouts):.0%}",
        f"{statistics.mean(rollout.num_context + rollout.num_trained for rollout in rollouts):,.0f}",
        f"{sum(rollout.reward == 1.0 for rollout in rollouts)}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=16, help="per harness and mode")
    parser.add_argument("--harnesses", nargs="+", default=HARNESSES)
    asked = parser.parse_args()
    console = Console(highlight=False, width=160)
    thoughts = asyncio.run(kept_thoughts(NUM_THOUGHTS, THOUGHTS, seed=0))
    other = sum(not thought.is_canonical for thought in thoughts)
    num_tokens = statistics.mean(len(thought.ids) for thought in thoughts)
    console.print(
        f"{len(thoughts)} thoughts of {num_tokens:.1f} tokens sampled at temperature 1; "
        f"the ids of {other} ({other / len(thoughts):.1%}) are not those that the tokenizer gives for their text"
    )
    table = Table()
    columns = ("harness", "continuation", "rollouts", "calls", "samples", "range", "one sample", "causes", "trained")
    for column in (*columns, "tokens in samples", "solved"):
        table.add_column(column)
    for harness in asked.harnesses:
        for continued in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                rollouts = asyncio.run(
                    measure(harness, thoughts, continued=continued, num_rollouts=asked.rollouts, folder=Path(folder))
                )
            row = _row(harness, "on" if continued else "off", rollouts)
            console.print(*row, sep=" | ")
            table.add_row(*row)
    console.print(table)
    console.print("without continuation, https://arxiv.org/abs/2608.17528 reports 2.41 samples, and one for 36 %")


if __name__ == "__main__":
    main()
