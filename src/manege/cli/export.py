"""A run's rollouts as a file: for other programs, for other machines, and to be read back.

`jsonl` and `parquet` hold everything, the tasks' hidden fields too, and `manege show`, `replay` and `export` take them
in place of a run. `sft` holds what good rollouts said, as chat messages; only rollouts for training are in it. The run
may go on meanwhile.
"""

import argparse
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from manege.cli.sft import SftWriter
from manege.cli.stored import RUN_HELP, config_of, find_run, reading
from manege.errors import ConfigError
from manege.store.base import Run
from manege.store.exports.base import ExportedRollout, ExportWriter
from manege.store.exports.jsonl import JsonlWriter
from manege.store.exports.parquet import ParquetWriter
from manege.store.reading import StoreReader
from manege.trainer.credit import sample_rules
from manege.trainer.durable import sync
from manege.types import Rollout, RolloutState, RunId

EXAMPLES = """examples:
  manege export runs/finder --format parquet
  manege export runs/finder --format sft --min-reward 1 --out good.jsonl
  manege export runs/finder --format jsonl && manege replay finder.jsonl
"""
_SUFFIX = {"jsonl": ".jsonl", "parquet": ".parquet", "sft": ".sft.jsonl"}
_PAGE = 16
"""Rollouts whose calls are in memory at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--format", choices=list(_SUFFIX), required=True)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: named after the run, in the current folder")
    parser.add_argument(
        "--state",
        type=RolloutState,
        choices=list(RolloutState),
        action="append",
        help="only rollouts in this state; may be repeated (default: all)",
    )
    parser.add_argument(
        "--min-reward",
        type=float,
        metavar="X",
        help="only rollouts with at least this reward (default: all; sft: the run's scorer.success_reward)",
    )


async def execute(arguments: argparse.Namespace) -> int:
    """Write the file; it appears when it is whole."""
    num_rollouts = num_calls = 0
    async with reading(arguments.run) as (reader, run_id):
        out: Path = arguments.out or Path(f"{run_id}{_SUFFIX[arguments.format]}")
        partial = out.with_name(f".{out.name}.partial")
        try:
            writer = _writer(arguments, partial, run_id, await find_run(reader, run_id))
            async for page in _pages(reader, run_id, arguments):
                for exported in page:
                    writer.add(exported)
                    num_rollouts, num_calls = num_rollouts + 1, num_calls + len(exported.calls)
            writer.close()
            sync(partial)
            os.replace(partial, out)
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error}") from error
        finally:
            partial.unlink(missing_ok=True)
    samples = f"{writer.num_samples} samples of " if isinstance(writer, SftWriter) else ""
    size = out.stat().st_size / 1e6
    print(f"{out}: {samples}{num_rollouts} rollouts with {num_calls} calls, {size:.1f} MB")
    return 0


def _writer(arguments: argparse.Namespace, path: Path, run_id: RunId, run: Run | None) -> ExportWriter:
    """For `sft` the arguments get what they leave to the run."""
    if arguments.format == "jsonl":
        return JsonlWriter(path, run)
    if arguments.format == "parquet":
        return ParquetWriter(path, run)
    config = config_of(run_id, run)
    if arguments.min_reward is None:
        arguments.min_reward = config.scorer.success_reward
    return SftWriter(path, sample_rules(config.credit, None))


async def _pages(
    reader: StoreReader, run_id: RunId, arguments: argparse.Namespace
) -> AsyncIterator[Sequence[ExportedRollout]]:
    """In the order of creation."""
    cursor = 0
    while True:
        page = await reader.list_rollouts(run=run_id, state=arguments.state, after=cursor, limit=_PAGE)
        if not page.rollouts:
            return
        cursor = page.cursor
        wanted = [rollout for rollout in page.rollouts if _is_wanted(rollout, arguments)]
        calls = await reader.calls([rollout.spec.id for rollout in wanted])
        yield [
            ExportedRollout(
                rollout=rollout, calls=calls.get(rollout.spec.id, []), events=await reader.events(rollout.spec.id)
            )
            for rollout in wanted
        ]


def _is_wanted(rollout: Rollout, arguments: argparse.Namespace) -> bool:
    if arguments.format == "sft" and not rollout.spec.is_train:
        return False
    minimum = arguments.min_reward
    return minimum is None or (rollout.reward is not None and rollout.reward >= minimum)
