"""The runs that are kept: which there are, how they differ, copies of them, and an end to them.

RUN is a run folder, a database (file or URL), or FOLDER_OR_DATABASE/NAME where it holds several runs. Lists,
comparisons and copies are made while runs go on.
"""

import argparse

from manege.cli import runs_backup, runs_compare, runs_list, runs_prune

EXAMPLES = """examples:
  manege runs list
  manege runs list postgresql://manege@db.internal/manege
  manege runs compare runs/finder runs/second
  manege runs prune --keep 5 --older-than 30d
  manege runs backup runs/finder /backup/finder
"""
_SUMMARIES = {
    runs_list: "which runs there are, and what they wait for",
    runs_compare: "how runs differ in config and in what they learnt",
    runs_prune: "delete what runs keep",
    runs_backup: "copy a database while it is in use",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    for module, summary in _SUMMARIES.items():
        name = module.__name__.rpartition("_")[2]
        action = actions.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(action)
        action.set_defaults(module=module)


async def execute(arguments: argparse.Namespace) -> int:
    """One of the actions."""
    return await arguments.module.execute(arguments)
