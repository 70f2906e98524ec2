"""Which tasks of a table are worth training on: FILE's steps over its rows, with counts at each.

What is done is in the folder and is not done again: a killed curation goes on where it was, in the middle of a probe
too, and a changed step is done anew with all after it.
"""

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from manege.cli.parts import FolderLock
from manege.cli.probing import probe_rows
from manege.curation.config import load_curation
from manege.curation.pipeline import StepReport, curate
from manege.curation.report import sentence, write_report

EXAMPLES = """examples:
  manege curate my/curate.toml
  manege curate my/curate.toml --folder runs/curated seed=1 steps.4.rollouts=4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("file", type=Path, help="the curation's TOML file (docs/guides/curation.md)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example seed=1 steps.0.column=text")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where all of it goes (default: runs/<name>)")
    parser.add_argument("--unsafe", action="store_true", help="run agents even where this machine cannot isolate them")
    parser.add_argument("--json", action="store_true", help="the report on stdout, as in report.json")


async def execute(arguments: argparse.Namespace) -> int:
    """Curate; leaves rows, report and picture in the folder."""
    console = Console(stderr=arguments.json)
    config = load_curation(arguments.file, arguments.overrides)
    base = arguments.file.parent.absolute()
    if str(base) not in sys.path:
        sys.path.append(str(base))
    folder: Path = (arguments.folder or Path("runs", config.name)).absolute()

    def on_step(step: StepReport, is_new: bool) -> None:
        how = f"{step.seconds:.1f} s" if is_new else "done before"
        console.print(f"{sentence(step)}  {how}", highlight=False, soft_wrap=True)

    with FolderLock(folder):
        probe = partial(probe_rows, base=base, id_column=config.id, unsafe=arguments.unsafe, console=console)
        report = await curate(config, base=base, folder=folder, probe=probe, on_step=on_step)
        lack = write_report(report, folder)
    for output in report.outputs:
        console.print(f"{output.path}: {output.num_rows:,} rows", highlight=False, soft_wrap=True)
    console.print(f"{folder / 'report.md'}" + (f", without a picture: {lack}" if lack else ""), soft_wrap=True)
    if arguments.json:
        print(json.dumps(asdict(report)))
    return 0
