"""`manege <verb>`: picks the verb, sets up logging, turns our errors into one line and Ctrl-C into a clean end."""

import argparse
import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Coroutine
from types import ModuleType
from typing import Any

import uvloop

from manege import __version__, logs
from manege.errors import ManegeError

__all__ = ["main", "make_parser"]

_VERBS = {
    "train": "train an agent's model",
    "eval": "success on held-out tasks",
    "curate": "which tasks of a table are worth training on",
    "run": "one task, one agent, the transcript",
    "gateway": "serve the agents' model endpoint and the rollout API",
    "controller": "run agents for a gateway",
    "harness": "list and install known agent harnesses",
    "engine": "serve a model folder on vLLM's token wire",
    "show": "a run's rollouts: their calls as a tree, their tokens",
    "export": "a run as a file: JSON lines, Parquet, or chat messages",
    "runs": "list, compare, prune and back up runs",
    "replay": "stored rollouts under other credit settings",
    "doctor": "what this machine can do, and what is missing",
}


def main(argv: list[str] | None = None) -> int:
    """The entry point of the `manege` command; returns its exit code."""
    if sys.platform == "win32":
        print(
            "manege needs Linux or macOS: native Windows has no processes that can be isolated. "
            "Use WSL: `wsl --install`, then run manege inside it",
            file=sys.stderr,
        )
        return 2
    modules = _modules()
    arguments = _parse(argv)
    logs.setup(verbose=arguments.verbose)
    try:
        return _run(modules[arguments.verb].execute(arguments))
    except ManegeError as error:
        print(f"manege {arguments.verb}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Overrides may stand before or after options, which argparse alone does not allow."""
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in overrides]
    if unknown or (overrides and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(unknown or overrides)}")
    if overrides:
        arguments.overrides = [*arguments.overrides, *overrides]
    return arguments


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="manege", description="Train the model of an agent inside the harness that is deployed."
    )
    parser.add_argument("--version", action="version", version=f"manege {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    modules = _modules()
    for name, summary in _VERBS.items():
        verb = verbs.add_parser(
            name,
            help=summary,
            description=modules[name].__doc__,
            epilog=modules[name].EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_argument("--verbose", action="store_true", help="log what the parts do to stderr")
        modules[name].add_arguments(verb)
    return parser


def _modules() -> dict[str, ModuleType]:
    return {name: importlib.import_module(f"manege.cli.{name}") for name in _VERBS}


def _run(command: Coroutine[Any, Any, int]) -> int:
    """Run a verb; the first SIGINT or SIGTERM cancels it, so that every part stops cleanly, and gives 130 or 143."""

    async def supervised() -> int:
        task = asyncio.ensure_future(command)
        received: list[int] = []
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            return await task
        except asyncio.CancelledError:
            if not received:
                raise
            return 128 + received[0]

    # Twice the calls per second of asyncio's own loop; there is none for Windows.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(supervised())
