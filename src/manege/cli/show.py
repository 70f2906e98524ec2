"""What a run's rollouts were: without ROLLOUT a list of them, with it the tree of its calls and what became of them.

The run may still be going on: nothing of it is changed, and nobody waits. Where two conversations part unexpectedly,
`--diff` says how. `--timeline` draws when each rollout ran and which weights sampled its calls. `--hacks` tells what
agents tried that honest ones have no need of, and whether it paid.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from manege.cli.console import narrow_console
from manege.cli.diff_view import diff_view, parting
from manege.cli.hacks_view import hacks_table, read_hacks
from manege.cli.places import pick
from manege.cli.rollout_view import SeenRollout, ending, header, look_at, reward_text, to_json
from manege.cli.stored import StoredRun, add_stored_arguments, stored_run
from manege.cli.timeline import read_timeline
from manege.cli.timeline_picture import draw_timeline
from manege.cli.token_view import call_tokens, token_lists
from manege.cli.tree_view import tree_table
from manege.errors import ConfigError, ModelError
from manege.model.folder import open_folder
from manege.store.codec import dumps
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.trainer.credit import sample_rules

EXAMPLES = """examples:
  manege show runs/finder
  manege show runs/finder 3f2a
  manege show runs/finder 3f2a --tokens | less -R
  manege show runs/finder 3f2a --diff 81c0 a7e2
  manege show runs/finder --timeline runs.png
  manege show runs/finder --hacks
  manege show finder --gateway http://127.0.0.1:8700 --key-file data/operator.key
"""
_NUM_LISTED = 40
"""Rollouts in a list, unless all are asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    add_stored_arguments(parser)
    parser.add_argument("rollout", metavar="ROLLOUT", nargs="?", help="a rollout's id, or its beginning")
    parser.add_argument("--all", action="store_true", help=f"list all rollouts, not only the last {_NUM_LISTED}")
    parser.add_argument("--tokens", action="store_true", help="the tokens of each call, by what became of them")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="where the prompts of these two calls part")
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        nargs="?",
        const="",
        help="a picture of the run (.svg or .png); without FILE timeline.svg in its folder; with --json its data",
    )
    parser.add_argument(
        "--hacks",
        action="store_true",
        help="what agents tried in vain, by kind, whether it paid, and which rewarded rollouts are unlike the others",
    )
    parser.add_argument("--json", action="store_true", help="data on stdout")


async def execute(arguments: argparse.Namespace) -> int:
    """Print what was asked for."""
    console = narrow_console()
    async with stored_run(arguments) as stored:
        if arguments.timeline is not None:
            await _timeline(stored, arguments)
            return 0
        if arguments.hacks:
            await _hacks(stored, arguments, console)
            return 0
        if arguments.rollout is None:
            if arguments.tokens or arguments.diff:
                raise ConfigError("--tokens and --diff need a ROLLOUT; `manege show RUN` lists them")
            await _list(stored, arguments, console)
            return 0
        ids = [each.spec.id for each in stored.rollouts]
        seen = await look_at(stored, pick(arguments.rollout, ids, f"rollout of run {stored.id}"))
        tokenizer = _tokenizer(stored) if arguments.tokens or arguments.diff else None
    if arguments.diff:
        _print_diff(seen, arguments, console, tokenizer)
    elif arguments.json:
        tokens = {"tokens": {call.id: token_lists(call, tokenizer) for call in seen.credited.forest.calls}}
        print(dumps({**to_json(seen), **(tokens if arguments.tokens else {})}))
    else:
        _print_tree(seen, arguments, console, tokenizer)
    return 0


async def _list(stored: StoredRun, arguments: argparse.Namespace, console: Console) -> None:
    """The most recent first."""
    listed = stored.rollouts[::-1][: None if arguments.all else _NUM_LISTED]
    calls = await stored.source.calls([rollout.spec.id for rollout in listed])
    config = stored.config()
    rules = sample_rules(config.credit, config.train.max_sample_tokens)
    rows = [
        {
            "id": rollout.spec.id,
            "task": rollout.spec.task.id,
            "is_train": rollout.spec.is_train,
            "state": rollout.state,
            "outcome": rollout.outcome,
            "reward": rollout.reward,
            "num_calls": len(own := calls.get(rollout.spec.id, [])),
            "num_samples": len(build_samples(build_forest(own), rules)[0]),
        }
        for rollout in listed
    ]
    if arguments.json:
        print(dumps(rows))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("rollout", no_wrap=True)
    table.add_column("task", no_wrap=True, max_width=24)
    for name in ("state", "for", "reward", "calls", "samples"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("state", "for") else "right")
    for rollout, row in zip(listed, rows, strict=True):
        purpose = "training" if row["is_train"] else "validation"
        numbers = [reward_text(rollout), str(row["num_calls"]), str(row["num_samples"])]
        table.add_row(Text(row["id"]), Text(row["task"]), ending(rollout), purpose, *numbers)
    console.print(table)
    if more := len(stored.rollouts) - len(listed):
        console.print(f"and {more} older ones (--all lists them)", style="dim")


async def _hacks(stored: StoredRun, arguments: argparse.Namespace, console: Console) -> None:
    if arguments.rollout or arguments.tokens or arguments.diff:
        raise ConfigError("--hacks is of a whole run: leave ROLLOUT, --tokens and --diff out")
    report = await read_hacks(stored)
    if arguments.json:
        print(dumps(report))
    else:
        console.print(hacks_table(report))


async def _timeline(stored: StoredRun, arguments: argparse.Namespace) -> None:
    if arguments.rollout or arguments.tokens or arguments.diff:
        raise ConfigError("--timeline is of a whole run: leave ROLLOUT, --tokens and --diff out")
    target = Path(arguments.timeline or Path((stored.place and stored.place.folder) or "", "timeline.svg"))
    if target.suffix not in (".svg", ".png"):
        raise ConfigError(f"--timeline {target}: the name ends in .svg or .png")
    timeline = await read_timeline(stored)
    if arguments.json:
        print(dumps(timeline))
        return
    draw_timeline(timeline, target, title=stored.id)
    print(f"{target}: {len(timeline.bars)} rollouts, {timeline.num_lanes} at once, {len(timeline.updates)} updates")


def _print_tree(
    seen: SeenRollout, arguments: argparse.Namespace, console: Console, tokenizer: Tokenizer | None
) -> None:
    console.print(*header(seen), "", sep="\n")
    by_id = {call.id: call for call in seen.credited.forest.calls}
    if not seen.rows:
        console.print("the agent made no model call")
    elif arguments.tokens:
        for row in seen.rows:
            console.print(call_tokens(row, by_id[row.id], tokenizer))
    else:
        console.print(tree_table(seen.rows))


def _print_diff(
    seen: SeenRollout, arguments: argparse.Namespace, console: Console, tokenizer: Tokenizer | None
) -> None:
    known = [call.id for call in seen.credited.forest.calls]
    first, second = (pick(name, known, f"call of rollout {seen.rollout.spec.id}") for name in arguments.diff)
    if first == second:
        raise ConfigError(f"--diff: both names are of call {first}; name two calls")
    found = parting(seen.credited.forest.calls, (first, second), tokenizer)
    if arguments.json:
        print(dumps(found))
    else:
        console.print(diff_view(found))


def _tokenizer(stored: StoredRun) -> Tokenizer | None:
    """The run's own; None where its model folder is not here."""
    try:
        return open_folder(stored.config().model.path).tokenizer
    except ModelError as error:
        print(f"tokens are shown as ids: {error}", file=sys.stderr)
        return None
