"""Arguments that several verbs share."""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manege.cli.parts import FolderLock
from manege.cli.services import with_ports
from manege.client import Client
from manege.config import KubernetesConfig, RunConfig, WorkspaceConfig, load_config
from manege.controller.workspaces.git import is_url
from manege.errors import ConfigError

__all__ = ["add_gateway_arguments", "add_run_arguments", "connect", "read_run", "scratch_folder", "with_files_of"]


def add_run_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """A run file, which may be `optional`, and what changes it."""
    parser.add_argument("run_file", type=Path, nargs="?" if optional else None, help="the run's TOML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.steps=3 model.path=FOLDER")
    parser.add_argument("--quick", action="store_true", help="apply the run file's [quick] table first")
    parser.add_argument("--unsafe", action="store_true", help="run agents even where this machine cannot isolate them")


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    """A gateway that runs elsewhere."""
    parser.add_argument("--gateway", metavar="URL", help="use this gateway instead of one in this process")
    parser.add_argument("--key-file", type=Path, help="file with its operator key (made by `manege gateway`)")


def read_run(arguments: argparse.Namespace) -> RunConfig:
    """The run's config. What lies beside the run file can be named in it: modules as `module:function`, files in
    commands and elsewhere by their relative path."""
    overrides = list(arguments.overrides)
    if arguments.unsafe:
        overrides.append("sandbox.unsafe=true")
    config = load_config(arguments.run_file, overrides, quick=arguments.quick)
    folder = arguments.run_file.parent.absolute()
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return with_ports(with_files_of(folder, config))


def with_files_of(folder: Path, config: RunConfig) -> RunConfig:
    """The config with absolute paths, since programs start in other folders, for what is named relative to `folder`."""

    def found(word: str) -> str:
        path = os.path.join(folder, os.path.expanduser(word))
        return path if os.path.isfile(path) else word

    def program(value: str | list[str] | None) -> str | list[str] | None:
        # As in a shell, a program without a slash is looked up in PATH.
        is_list = isinstance(value, list)
        return [found(word) if index or "/" in word else word for index, word in enumerate(value)] if is_list else value

    def below(path: str) -> str:
        return os.path.join(folder, os.path.expanduser(path))

    def placed(workspace: WorkspaceConfig | None) -> WorkspaceConfig | None:
        if workspace is None:
            return None
        source = workspace.source
        # What begins with a field of the task is known with the task.
        is_path = not is_url(source) and not source.startswith("{")
        setup = [program(command) for command in workspace.setup]
        return workspace.model_copy(update={"source": below(source) if is_path else source, "setup": setup})

    agent, scorer, tasks = config.agent, config.scorer, config.tasks
    programs = {"run": program(agent.run), "setup": program(agent.setup), "workspace": placed(agent.workspace)}
    judge = {"run": program(scorer.run), "readable": [below(path) for path in scorer.readable]}
    readable = [below(path) for path in config.sandbox.readable]
    return config.model_copy(
        update={
            "agent": agent.model_copy(update=programs),
            "services": {
                name: service.model_copy(update={"run": program(service.run)})
                for name, service in config.services.items()
            },
            "scorer": scorer.model_copy(update=judge),
            "tasks": tasks.model_copy(
                update={"train": found(tasks.train), "heldout": found(tasks.heldout or "") or None}
            ),
            "sandbox": config.sandbox.model_copy(update={"readable": readable}),
            "kubernetes": _with_template_of(folder, config.kubernetes),
        }
    )


def _with_template_of(folder: Path, kubernetes: KubernetesConfig) -> KubernetesConfig:
    """The text of a template file, since who makes Jobs of it is elsewhere."""
    named = kubernetes.template
    if named is None or "\n" in named:
        return kubernetes
    try:
        text = (folder / named).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"kubernetes.template = {named!r} cannot be read: {error}") from error
    return kubernetes.model_copy(update={"template": text + "\n"})


def connect(arguments: argparse.Namespace) -> Client:
    """A client of the gateway named on the command line."""
    if arguments.key_file is None:
        raise ConfigError("--gateway needs --key-file FILE: the operator key that `manege gateway` keeps in its folder")
    try:
        key = arguments.key_file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--key-file {arguments.key_file} cannot be read: {error}") from error
    return Client(arguments.gateway, key)


@contextmanager
def scratch_folder(config: RunConfig) -> Iterator[RunConfig]:
    """The config with a run folder that is thrown away, unless one is named."""
    if config.folder is not None:
        with FolderLock(config.folder):
            yield config
        return
    with tempfile.TemporaryDirectory(prefix="manege-") as folder:
        yield config.model_copy(update={"folder": Path(folder)})
