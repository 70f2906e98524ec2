"""One task, one agent: run it once and print the transcript, the outcome and the reward.

The agent is that of a run file, or a known harness (`manege harness list`) on a copy of a folder.
"""

import argparse
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from manege.cli.arguments import add_gateway_arguments, add_run_arguments, connect, read_run, scratch_folder
from manege.cli.parts import FolderLock, check_agents, controlling, serving
from manege.cli.services import refuse_services
from manege.cli.shell import lent_terminal
from manege.client import Client
from manege.config import RunConfig, override, parse_config
from manege.errors import ConfigError
from manege.trainer.collect import Group, GroupFeed
from manege.trainer.tasks import load_tasks
from manege.types import Call, RunId, Task

EXAMPLES = """examples:
  manege run src/manege/recipes/finder/run.toml
  manege run src/manege/recipes/finder/run.toml --task 3 --temperature 0 model.path=runs/finder/model
  manege run src/manege/recipes/finder/run.toml --shell
  manege run --harness claude-code --task "Fix the failing test" --workspace ~/project model.path=FOLDER
"""

_COPY = ["sh", "-c", 'tar -C "$0" --exclude=./.git -cf - . | tar -xf -']
"""The copy has no history: an agent could leave hooks in it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    add_run_arguments(parser, optional=True)
    add_gateway_arguments(parser)
    parser.add_argument("--harness", metavar="NAME", help="run this known harness instead of a run file's agent")
    parser.add_argument(
        "--task", metavar="ID", help="id or position of a held-out task (default: 0); for --harness, what it is told"
    )
    parser.add_argument("--workspace", type=Path, metavar="DIR", help="folder whose copy a harness works on")
    parser.add_argument(
        "--shell", action="store_true", help="look around: a shell in the agent's sandbox instead of it"
    )
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the run's sampling.temperature)")


async def execute(arguments: argparse.Namespace) -> int:
    """Run the agent once; exit code 0 whether or not it succeeds."""
    console = Console()
    with _prepared(arguments) as (config, task), lent_terminal() if arguments.shell else nullcontext() as terminal:
        check_agents(config, [task], console)
        temperature = config.sampling.temperature if arguments.temperature is None else arguments.temperature
        async with _client(arguments, config, terminal) as client:
            run = RunId(config.name)
            await client.put_run(run, config.to_json())
            feed = GroupFeed(client, run, cursor=0, reward_from=config.scorer.reward_from, max_attempts=1)
            await feed.start(task, size=1, is_train=False, temperature=temperature)
            group = await feed.next_group()
        _print(console, group)
        if config.controller.keep_workspaces:
            [rollout] = group.rollouts
            left = config.run_folder / "rollouts" / rollout.spec.id / str(rollout.attempt) / "left" / "workspace"
            console.print(f"what it left: {left}", highlight=False, soft_wrap=True)
    return 0


@contextmanager
def _prepared(arguments: argparse.Namespace) -> Iterator[tuple[RunConfig, Task]]:
    """The run and its one task."""
    if arguments.harness is None:
        if arguments.run_file is None:
            raise ConfigError("name a run file, or a harness with --harness")
        if arguments.workspace is not None:
            raise ConfigError("--workspace needs --harness; a run file prepares its workspace with agent.setup")
        with scratch_folder(read_run(arguments)) as config:
            split = "heldout" if config.tasks.heldout else "train"
            yield config, _pick(load_tasks(config.tasks, split, seed=config.seed), arguments.task or "0")
        return
    if not arguments.task:
        raise ConfigError('--harness needs --task "what it is told"')
    config = _harness_run(arguments)
    with FolderLock(config.run_folder):
        yield config, Task(id="task", input={"task": arguments.task})


def _harness_run(arguments: argparse.Namespace) -> RunConfig:
    """A run without tasks of its own and without a verdict."""
    name = f"{arguments.harness}-{time.strftime('%Y%m%d-%H%M%S')}"
    agent: dict[str, Any] = {"harness": arguments.harness}
    if arguments.workspace is not None:
        if not arguments.workspace.is_dir():
            raise ConfigError(f"--workspace {arguments.workspace}: no such folder")
        agent["setup"] = [*_COPY, str(arguments.workspace.absolute())]
    tree: dict[str, Any] = {
        "name": name,
        "tasks": {"train": "none"},
        "agent": agent,
        "scorer": {"run": ["echo", "null"]},
        "controller": {"keep_workspaces": True, "slots": 1},
        "sandbox": {"unsafe": arguments.unsafe},
    }
    # Without a run file, the first override stands in its place.
    override(tree, [*([str(arguments.run_file)] if arguments.run_file else []), *arguments.overrides])
    return parse_config(tree, source="command line")


@asynccontextmanager
async def _client(arguments: argparse.Namespace, config: RunConfig, terminal: str | None) -> AsyncIterator[Client]:
    """Of a gateway in this process, or of one elsewhere; the agent runs here."""
    if not arguments.gateway:
        async with serving(config, train=False, terminal=terminal) as parts:
            yield parts.client
        return
    refuse_services(config)
    async with connect(arguments) as client, controlling(client, config, terminal=terminal):
        yield client


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
