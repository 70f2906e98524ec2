"""Train an agent's model: everything in this process, or against a gateway that runs elsewhere."""

import argparse
import asyncio
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from manege.cli.arguments import add_gateway_arguments, add_run_arguments, connect, read_run
from manege.cli.dry_run import add_dry_run_arguments, dry_run, refuse_without_dry_run
from manege.cli.parts import FolderLock, Parts, check_agents, serving, train_engine_alone
from manege.cli.view import TrainView, summary
from manege.client import Client
from manege.config import RunConfig, changed_settings
from manege.errors import ConfigError
from manege.trainer.durable import write_text
from manege.trainer.loop import Trainer
from manege.trainer.tasks import load_train_and_heldout
from manege.trainer.writers import tracked

EXAMPLES = """examples:
  manege train src/manege/recipes/finder/run.toml
  manege train src/manege/recipes/finder/run.toml --quick folder=runs/quick
  manege train my/run.toml train.learning_rate=1e-5 seed=1 folder=runs/second
  manege train my/run.toml folder=runs/second --resume
  manege train my/run.toml --dry-run --gpus 8 --gpu-memory 80
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    add_run_arguments(parser)
    add_gateway_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the run folder's last checkpoint")
    parser.add_argument("--allow-changes", action="store_true", help="--resume with another config than before")
    add_dry_run_arguments(parser)


async def execute(arguments: argparse.Namespace) -> int:
    """Train; leaves metrics, curve, checkpoints and the model in the run folder."""
    config = read_run(arguments)
    if arguments.dry_run:
        return dry_run(arguments, config)
    refuse_without_dry_run(arguments)
    folder = config.run_folder
    console = Console()
    with FolderLock(folder):
        _check_folder(folder, resume=arguments.resume)
        train_tasks, heldout_tasks = load_train_and_heldout(config.tasks, seed=config.seed)
        check_agents(config, train_tasks, console)
        _keep_config(folder, config, arguments, console)
        console.print(f"manege train {config.name}: run folder {folder}", highlight=False)
        try:
            async with AsyncExitStack() as stack:
                view = TrainView(config, console)
                # Before the live view: a writer may ask for a key.
                observer = stack.enter_context(tracked(view, config))
                stack.enter_context(view)
                view.on_phase("loading the model")
                parts = await stack.enter_async_context(_parts(arguments, config))
                assert parts.train_engine is not None
                trainer = Trainer(
                    config,
                    parts.client,
                    parts.train_engine,
                    observer,
                    train_tasks=train_tasks,
                    heldout_tasks=heldout_tasks,
                    clock=time.time,
                    decode=parts.folder.decode,
                    resume=arguments.resume,
                )
                rows = await _train(trainer, parts.client, view)
        except asyncio.CancelledError:
            console.print(f"\nstopped; go on with: {_resume_command(arguments)}", highlight=False, soft_wrap=True)
            raise
    console.print(summary(rows, config))
    console.print(_next_commands(arguments.run_file, folder), highlight=False, soft_wrap=True)
    return 0


def _parts(arguments: argparse.Namespace, config: RunConfig) -> AbstractAsyncContextManager[Parts]:
    if arguments.gateway:
        return train_engine_alone(config, connect(arguments))
    return serving(config, train=True)


async def _train(trainer: Trainer, client: Client, view: TrainView) -> Sequence[Mapping[str, Any]]:
    poll = asyncio.create_task(view.poll(client), name="view")
    try:
        return await trainer.run()
    finally:
        poll.cancel()


def _check_folder(folder: Path, *, resume: bool) -> None:
    used = any((folder / name).exists() for name in ("nonce", "metrics.jsonl", "checkpoints"))
    if used and not resume:
        raise ConfigError(
            f"run folder {folder} already holds a run; go on with --resume, or choose another one with folder=..."
        )
    if resume and not used:
        raise ConfigError(f"--resume: run folder {folder} holds no run; check folder=...")


def _keep_config(folder: Path, config: RunConfig, arguments: argparse.Namespace, console: Console) -> None:
    """A resumed run must be the same run: another seed, model or task set would mix two trainings in one record."""
    path, new = folder / "config.json", config.to_json()
    if arguments.resume and path.exists():
        changes = list(changed_settings(json.loads(path.read_text(encoding="utf-8")), new))
        if changes and not arguments.allow_changes:
            raise ConfigError(
                f"--resume: the run in {folder} has another config: {'; '.join(changes)}. Give the overrides that it "
                "was started with, or go on with the new config with --allow-changes"
            )
        for change in changes:
            console.print(f"changed: {change}", highlight=False, soft_wrap=True)
    write_text(path, json.dumps(new, indent=1))


def _resume_command(arguments: argparse.Namespace) -> str:
    flags = [flag for flag in ("quick", "unsafe") if getattr(arguments, flag)]
    words = ["manege", "train", str(arguments.run_file), *arguments.overrides, *(f"--{flag}" for flag in flags)]
    if arguments.gateway:
        words += ["--gateway", arguments.gateway, "--key-file", str(arguments.key_file)]
    return shlex.join([*words, "--resume"])


def _next_commands(run_file: Path, folder: Path) -> str:
    return "\n".join(
        [
            f"model    {folder / 'model'} (Hugging Face format)",
            f"curve    {folder / 'curve.png'}, curve.svg; metrics.jsonl beside them",
            "next:",
            f"  manege run  {run_file} model.path={folder / 'model'}   # one task, with the transcript",
            f"  manege run  {run_file}   # the same with the untrained model",
            f"  manege eval {run_file} model.path={folder / 'model'}   # held-out success",
        ]
    )
