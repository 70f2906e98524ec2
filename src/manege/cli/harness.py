"""Known harnesses: which there are, and their installation in pinned versions."""

import argparse
import asyncio

from rich.console import Console

from manege.errors import HarnessError
from manege.harnesses.harness import load, names
from manege.harnesses.install import find, install, root_folder

EXAMPLES = """examples:
  manege harness list
  manege harness install codex mini-swe-agent
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("action", choices=["list", "install"])
    parser.add_argument("names", nargs="*", metavar="name", help="to install; `all`: all that are known")


async def execute(arguments: argparse.Namespace) -> int:
    """List or install."""
    console, root = Console(highlight=False, soft_wrap=True), root_folder()
    if arguments.action == "list":
        for name in names():
            console.print(f"{name:16}{load(name).version:12}{_state(name)}")
        return 0
    if not arguments.names:
        raise HarnessError(f"name what to install: all, or some of {', '.join(names())}")
    chosen = names() if arguments.names == ["all"] else arguments.names
    for harness in [load(name) for name in chosen]:
        is_new = await asyncio.to_thread(install, harness, root)
        state = "installed" if is_new else "was there"
        console.print(f"{harness.name} {harness.version} {state}: {root / harness.name}")
    return 0


def _state(name: str) -> str:
    try:
        find(load(name), root_folder())
    except HarnessError:
        return "not installed"
    return "installed"
