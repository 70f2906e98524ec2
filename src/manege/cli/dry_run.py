"""`manege train RUN --dry-run`: print the plan, and every reason why it cannot work."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from manege.cli.machine import Machine, add_machine_arguments, machine_of
from manege.cli.parts import check_agents
from manege.cli.plan import Plan, make_plan
from manege.cli.verl import check_verl, has_verl
from manege.config import RunConfig
from manege.errors import ConfigError, ManegeError
from manege.model.folder import hub_file, is_hub_name, open_folder
from manege.trainer.tasks import load_train_and_heldout

__all__ = ["add_dry_run_arguments", "dry_run", "refuse_without_dry_run"]


def add_dry_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What to plan, and for which machine."""
    parser.add_argument("--dry-run", action="store_true", help="start nothing; print what would be, and if it can be")
    add_machine_arguments(parser)
    parser.add_argument(
        "--model-config", type=Path, metavar="FILE", help="--dry-run: config.json of a model that is not here"
    )


def refuse_without_dry_run(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for arguments that would do nothing."""
    for name in ("gpus", "gpu_memory", "model_config"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does nothing here: it needs --dry-run")


def dry_run(arguments: argparse.Namespace, config: RunConfig) -> int:
    """Print the plan; 2: it cannot work. Raises ConfigError and ModelError where there is nothing to reckon with."""
    machine = machine_of(arguments)
    folder, model_config = _model(config.model.path, arguments.model_config)
    num_tasks, reasons = _tasks(config, machine)
    plan = make_plan(config, model_config, folder, machine, gateway_url=arguments.gateway, num_tasks=num_tasks)
    reasons += plan.reasons or _verls_own(config, folder, machine)
    console = Console()
    console.print(f"manege train {config.name}: the plan; nothing is started", highlight=False)
    _print(plan, console)
    for reason in reasons:
        print(f"manege train: {reason}", file=sys.stderr)
    return 2 if reasons else 0


def _model(path: str, given: Path | None) -> tuple[Path, Mapping[str, Any]]:
    """Where it is, and its config.json, without its weights."""
    if given is not None:
        return Path(path), _read(given)
    if is_hub_name(path):
        return Path(path), _read(hub_file(path, "config.json"))
    folder = open_folder(path)
    return folder.path, folder.config


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no config.json of a model: {error}") from error


def _tasks(config: RunConfig, machine: Machine) -> tuple[int | None, list[str]]:
    """How many to train on; why they or the agents cannot be used."""
    try:
        train, _ = load_train_and_heldout(config.tasks, seed=config.seed)
        if machine.is_here:
            check_agents(config, train, Console(stderr=True))
    except ManegeError as error:
        return None, [str(error)]
    return len(train), []


def _verls_own(config: RunConfig, folder: Path, machine: Machine) -> list[str]:
    """What verl says of its settings, where it is."""
    if config.backend.kind != "verl" or not has_verl() or not folder.is_dir():
        return []
    try:
        check_verl(config, open_folder(str(folder)), cpu=machine.num_gpus == 0 or config.model.device == "cpu")
    except ManegeError as error:
        return [str(error)]
    return []


def _print(plan: Plan, console: Console) -> None:
    width = max(len(name) for _, rows in plan.sections for name, _ in rows)
    for title, rows in plan.sections:
        console.print(f"\n{title}", highlight=False, markup=False)
        for name, text in rows:
            console.print(f"  {name:{width}}  {text}", highlight=False, soft_wrap=True, markup=False)
    console.print()
