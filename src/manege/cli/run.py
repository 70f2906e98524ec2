"""One task, one agent: run it once and print the transcript, the outcome and the reward."""

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from manege.cli.arguments import add_run_arguments, read_run, scratch_folder
from manege.cli.parts import check_agents, serving
from manege.errors import ConfigError
from manege.trainer.collect import Group, GroupFeed
from manege.trainer.tasks import load_tasks
from manege.types import Call, RunId, Task

EXAMPLES = """examples:
  manege run src/manege/recipes/finder/run.toml
  manege run src/manege/recipes/finder/run.toml --task 3 --temperature 0 model.path=runs/finder/model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    add_run_arguments(parser)
    parser.add_argument("--task", default="0", metavar="ID", help="id or position of a held-out task (default: 0)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the run's sampling.temperature)")


async def execute(arguments: argparse.Namespace) -> int:
    """Run the agent once; exit code 0 whether or not it succeeds."""
    console = Console()
    with scratch_folder(read_run(arguments)) as config:
        split = "heldout" if config.tasks.heldout else "train"
        task = _pick(load_tasks(config.tasks, split, seed=config.seed), arguments.task)
        check_agents(config, [task], console)
        temperature = config.sampling.temperature if arguments.temperature is None else arguments.temperature
        async with serving(config, train=False) as parts:
            run = RunId(config.name)
            await parts.client.put_run(run, config.to_json())
            feed = GroupFeed(parts.client, run, cursor=0, reward_from=config.scorer.reward_from, max_attempts=1)
            await feed.start(task, size=1, is_train=False, temperature=temperature)
            _print(console, await feed.next_group())
    return 0


def _pick(tasks: Sequence[Task], wanted: str) -> Task:
    for position, task in enumerate(tasks):
        if wanted in (task.id, str(position)):
            return task
    raise ConfigError(f"--task {wanted!r}: no such task; there are {len(tasks)}, for example {tasks[0].id!r}")


def _print(console: Console, group: Group) -> None:
    [rollout], [calls] = group.rollouts, group.calls
    console.print(Text(f"task {group.task.id}", style="bold"))
    for call in calls:
        _print_call(console, call)
    if not calls:
        console.print("the agent made no model call")
    evidence = rollout.evidence
    for stream in ("stdout_tail", "stderr_tail"):
        if text := str(evidence.get(stream) or "").strip():
            console.print(Text(f"{stream.removesuffix('_tail')}:", style="bold"), Text(text))
    reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
    message = f" ({rollout.message})" if rollout.message else ""
    console.print(Text(f"outcome {rollout.outcome}{message}, reward {reward}", style="bold"))


def _print_call(console: Console, call: Call) -> None:
    for message in call.request.get("messages", []):
        console.print(Text(f"{message['role']}: ", style="cyan"), Text(_content(message)), sep="")
    reply = _content(call.reply)
    console.print(Text("model: ", style="green"), Text(reply), Text(f"  [{len(call.response_ids_R)} tokens]"), sep="")


def _content(message: Any) -> str:
    content = message.get("content") or message.get("text") or ""
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or []]
    return " ".join([content if isinstance(content, str) else str(content), *calls]).strip()
