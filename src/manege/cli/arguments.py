"""Arguments that several verbs share."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manege.client import Client
from manege.config import RunConfig, load_config
from manege.errors import ConfigError

__all__ = ["add_gateway_arguments", "add_run_arguments", "connect", "read_run", "scratch_folder"]


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """A run file and what changes it."""
    parser.add_argument("run_file", type=Path, help="the run's TOML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.steps=3 model.path=FOLDER")
    parser.add_argument("--quick", action="store_true", help="apply the run file's [quick] table first")
    parser.add_argument("--unsafe", action="store_true", help="run agents even where this machine cannot isolate them")


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    """A gateway that runs elsewhere."""
    parser.add_argument("--gateway", metavar="URL", help="use this gateway instead of one in this process")
    parser.add_argument("--key-file", type=Path, help="file with its operator key (made by `manege gateway`)")


def read_run(arguments: argparse.Namespace) -> RunConfig:
    """The run's config. Modules beside the run file can be named in it as `module:function`."""
    overrides = list(arguments.overrides)
    if arguments.unsafe:
        overrides.append("sandbox.unsafe=true")
    config = load_config(arguments.run_file, overrides, quick=arguments.quick)
    folder = str(arguments.run_file.parent.absolute())
    if folder not in sys.path:
        sys.path.append(folder)
    return config


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
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="manege-") as folder:
        yield config.model_copy(update={"folder": Path(folder)})
